"""OpenTelemetry traces of requests, as an exporter and as OTLP collectors get them."""

from __future__ import annotations

import concurrent.futures
import http.server
import json
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import MODEL, Server, engine_config, running
from test_fronts import fronted

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from jackfield.core.errors import ConfigError
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.registry import load_plugins
from jackfield.entrypoints.http.options import BatchOptions, ServerOptions
from jackfield.entrypoints.server.serve_settings import settings
from jackfield.plugins.traces.request_traces import RequestTraces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "ignore_eos": True},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 5, "ignore_eos": True},
    "/api/chat": {
        "model": MODEL,
        "messages": MESSAGES,
        "options": {"num_predict": 5},
        "ignore_eos": True,
    },
}


class Spans(InMemorySpanExporter):
    def of(self, server: Server, *, ended: int = 1) -> dict[str, list[ReadableSpan]]:
        """Spans by name, once so many requests have ended."""

        def have_ended(_: Any) -> bool:
            servers = [s for s in self.get_finished_spans() if s.kind is SpanKind.SERVER]
            # The hook runs in a task of its own.
            return len(servers) >= ended and not server.engine._events._tasks

        assert server.becomes(have_ended)
        by_name: dict[str, list[ReadableSpan]] = {}
        for span in self.get_finished_spans():
            by_name.setdefault(span.name, []).append(span)
        return by_name


@pytest.fixture(scope="module")
def exporter() -> Spans:
    return Spans()


@pytest.fixture(scope="module")
def server(exporter: Spans, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    plugins = load_plugins(extra=[RequestTraces(exporter, SimpleSpanProcessor(exporter))])
    options = ServerOptions(batches=BatchOptions(tmp_path_factory.mktemp("batches")))
    with running(engine_config(EMBEDDED_MODEL), options, plugins=plugins) as running_server:
        yield running_server


@pytest.fixture(autouse=True)
def _empty(exporter: Spans) -> None:
    exporter.clear()


def ids(span: ReadableSpan) -> tuple[str, str | None]:
    """A span's trace and parent."""
    assert span.context is not None
    parent = None if span.parent is None else f"{span.parent.span_id:016x}"
    return f"{span.context.trace_id:032x}", parent


def own_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_a_request_is_a_span_below_the_callers_with_its_phases(
    route: str, stream: bool, server: Server, exporter: Spans
) -> None:
    response = httpx.post(
        server.url + route, json={**BODIES[route], "stream": stream}, headers=HEADERS, timeout=60
    )
    assert response.status_code == 200, response.text
    spans = exporter.of(server)
    operation = "text_completion" if route == "/v1/completions" else "chat"
    [outer], [request] = spans[f"POST {route}"], spans[f"{operation} {MODEL}"]
    assert ids(outer) == (TRACE, PARENT)
    assert ids(request) == (TRACE, own_id(outer))
    assert outer.attributes is not None and request.attributes is not None
    assert outer.attributes["http.response.status_code"] == 200
    assert request.attributes["gen_ai.usage.output_tokens"] == 5
    assert request.attributes["gen_ai.request.max_tokens"] == 5
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)
    if not stream:
        usage = response.json().get("usage", response.json())
        usage.setdefault("input_tokens", usage.get("prompt_eval_count"))  # Ollama's name.
        num_prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        num_cached = usage.get("cache_read_input_tokens", 0)
        num_prompt += num_cached if route == "/v1/messages" else 0
        assert request.attributes["gen_ai.usage.input_tokens"] == num_prompt
    phases = [spans[name][0] for name in ("queued", "prefill", "decode")]
    assert [ids(phase) for phase in phases] == [(TRACE, own_id(request))] * 3
    ends = [request.start_time, *(phase.end_time for phase in phases)]
    assert [phase.start_time for phase in phases] == ends[:3]
    assert ends == sorted(ends, key=int) and request.end_time is not None
    assert phases[2].end_time is not None and phases[2].end_time <= request.end_time


def test_each_prompt_of_a_request_is_a_span_and_has_its_request_without_a_parent(
    server: Server, exporter: Spans
) -> None:
    body = {**BODIES["/v1/completions"], "prompt": ["a", "b", "c"], "n": 2}
    assert httpx.post(server.url + "/v1/completions", json=body, timeout=60).status_code == 200
    spans = exporter.of(server)
    [outer] = spans["POST /v1/completions"]
    requests = spans[f"text_completion {MODEL}"]
    assert ids(outer)[1] is None
    assert [ids(span)[1] for span in requests] == [own_id(outer)] * 3
    assert [(span.attributes or {})["gen_ai.usage.output_tokens"] for span in requests] == [10] * 3


def test_a_refused_request_is_a_span_with_its_status(server: Server, exporter: Spans) -> None:
    body = {**BODIES["/v1/completions"], "max_tokens": -1}
    assert httpx.post(server.url + "/v1/completions", json=body).status_code == 400
    spans = exporter.of(server)
    assert list(spans) == ["POST /v1/completions"]
    attributes = spans["POST /v1/completions"][0].attributes or {}
    assert attributes["http.response.status_code"] == 400
    assert attributes["error.type"] == "InvalidRequest"


def test_lines_of_a_batch_are_in_the_trace_of_who_began_it(server: Server, exporter: Spans) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    file = json.dumps({**line, "body": BODIES["/v1/completions"]}).encode()
    form = {"data": {"purpose": "batch"}, "files": {"file": file}}
    file_id = httpx.post(server.url + "/v1/files", **form).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    response = httpx.post(server.url + "/v1/batches", json=body, headers=HEADERS)
    assert response.status_code == 200, response.text
    assert server.becomes(
        lambda _: any(s.name.startswith("text_completion") for s in exporter.get_finished_spans())
    )
    spans = exporter.of(server)
    [request] = spans[f"text_completion {MODEL}"]
    assert ids(request) == (TRACE, own_id(spans["POST /v1/batches"][0]))


# ---------------------------------------------------------------- collectors


class Collector(http.server.BaseHTTPRequestHandler):
    """An OTLP receiver over HTTP."""

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.put(ExportTraceServiceRequest.FromString(body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def over_http() -> Iterator[tuple[str, queue.Queue[Any]]]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        received: queue.Queue[Any] = queue.Queue()
        collector.received = received  # type: ignore[attr-defined]
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{collector.server_port}", received
        collector.shutdown()


@pytest.fixture
def over_grpc() -> Iterator[tuple[str, queue.Queue[Any]]]:
    grpc = pytest.importorskip("grpc")
    received: queue.Queue[Any] = queue.Queue()

    def export(request: Any, _: object) -> Any:
        received.put(request)
        return ExportTraceServiceResponse()

    handler = grpc.unary_unary_rpc_method_handler(
        export,
        request_deserializer=ExportTraceServiceRequest.FromString,
        response_serializer=ExportTraceServiceResponse.SerializeToString,
    )
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    collector = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    collector.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {"Export": handler})]
    )
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    yield f"grpc://127.0.0.1:{port}", received
    collector.stop(None).wait()


@pytest.mark.parametrize("protocol", ["over_http", "over_grpc"])
def test_a_collector_gets_the_spans_of_a_served_request(
    protocol: str, request: pytest.FixtureRequest
) -> None:
    url, received = request.getfixturevalue(protocol)
    made = settings(["--otlp-traces-endpoint", url, "--collect-detailed-traces", "all"])
    config = engine_config(EMBEDDED_MODEL, plugin_options=made.config.plugin_options)
    with running(config, made.options, plugins=made.plugins) as traced:
        body = BODIES["/v1/completions"]
        response = httpx.post(
            traced.url + "/v1/completions", json=body, headers=HEADERS, timeout=60
        )
        assert response.status_code == 200
    # What is waiting is exported before the server has stopped.
    names = set()
    while not received.empty():
        for resource in received.get().resource_spans:
            [service] = [a for a in resource.resource.attributes if a.key == "service.name"]
            assert service.value.string_value == "jackfield"
            for span in resource.scope_spans[0].spans:
                assert span.trace_id.hex() == TRACE
                names.add(span.name)
    assert names == {
        "POST /v1/completions", f"text_completion {MODEL}", "queued", "prefill", "decode"
    }  # fmt: skip


@pytest.mark.slow
def test_each_front_end_traces_the_requests_that_it_serves(
    over_http: tuple[str, queue.Queue[Any]],
) -> None:
    url, received = over_http
    counts: Counter[str] = Counter()
    with fronted("--otlp-traces-endpoint", url) as traced:
        for _ in range(4):
            body = {"messages": MESSAGES, "max_tokens": 4}
            response = httpx.post(
                traced.url + "/v1/chat/completions", json=body, headers=HEADERS, timeout=60
            )
            assert response.status_code == 200
        while counts.total() < 20:
            for resource in received.get(timeout=60).resource_spans:
                spans = resource.scope_spans[0].spans
                assert {span.trace_id.hex() for span in spans} == {TRACE}
                counts.update(span.name.split()[0] for span in spans)
    assert counts == dict.fromkeys(("POST", "chat", "queued", "prefill", "decode"), 4)


# ---------------------------------------------------------------- off, and refused


def test_without_an_endpoint_nothing_is_imported_and_no_one_listens() -> None:
    program = (
        "import sys\n"
        "from jackfield.core.registry import load_plugins\n"
        "plugins = load_plugins()\n"
        "plugins.configure({})\n"
        "assert not plugins.has_listeners('request_finished')\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_options_turn_traces_on_and_off() -> None:
    plugins = load_plugins()
    plugins.configure({"traces": {"endpoint": "http://127.0.0.1:4318"}})
    assert plugins.has_listeners("request_finished")
    plugins.configure({})
    assert not plugins.has_listeners("request_finished")


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://", "http://x:port"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"traces\.endpoint: must be a URL"):
        load_plugins().configure({"traces": {"endpoint": endpoint}})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(ConfigError, match=r"install jackfield\[traces\]"):
        load_plugins().configure({"traces": {"endpoint": "http://127.0.0.1:4318"}})


def test_a_protocol_of_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json'"):
        load_plugins().configure({"traces": {"endpoint": "http://127.0.0.1:4318"}})

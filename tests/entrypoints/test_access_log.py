"""The access log has a line a request, also where the client left; /metrics counts them all."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import prometheus_client.parser
import pytest
from serving import MODEL, Server, engine_config, running

from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.entrypoints.http import request_log
from jackfield.entrypoints.http.options import ServerOptions

MESSAGES = [{"role": "user", "content": "Hello"}]
LONG = {"ignore_eos": True, "max_tokens": 400}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", **LONG},
    "/v1/chat/completions": {"messages": MESSAGES, **LONG},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, **LONG},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 400, "ignore_eos": True},
    "/api/chat": {"model": MODEL, "messages": MESSAGES, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = ServerOptions(access_log="json")
    with running(engine_config(EMBEDDED_MODEL), options) as running_server:
        yield running_server


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, request_log.access.name)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(r.message) for r in caplog.records if r.name == request_log.access.name]


def leave(server: Server, route: str, body: dict[str, Any]) -> None:
    """Send a request; leave once the engine has made a few tokens, and its answer has begun if it
    streams."""
    at = urlsplit(server.url)
    data = json.dumps(body).encode()
    head = (
        f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: mine\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((at.hostname, at.port), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        if body.get("stream"):
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        assert server.becomes(
            lambda engine: any(
                len(request.output_token_ids) > 2
                for state in engine.core.requests.states.values()
                for request in state.requests
            )
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_a_client_that_leaves_has_its_line(
    server: Server, route: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    leave(server, route, {**BODIES[route], "stream": stream})
    assert server.becomes(lambda engine: not engine.core.requests.states)
    assert server.becomes(lambda _: bool(lines(caplog)))
    assert httpx.get(server.url + "/version").status_code == 200
    assert server.becomes(lambda _: len(lines(caplog)) > 1)
    line, after = lines(caplog)
    assert (line["status"], line["path"], line["method"]) == (499, route, "POST")
    assert line["request_id"] == "mine" and 0 < line["ttft"] < line["seconds"]
    assert 2 < line["tokens"] < 400
    assert (line["bytes"] > 100) == stream
    assert (after["status"], after["path"], after["tokens"]) == (200, "/version", None)


def test_prompts_of_a_request_that_is_left_are_counted_together(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    body = {**BODIES["/v1/completions"], "prompt": ["a", "b"], "n": 2, "stream": True}
    leave(server, "/v1/completions", body)
    assert server.becomes(lambda _: bool(lines(caplog)))
    (line,) = lines(caplog)
    assert line["status"] == 499 and line["tokens"] > 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_a_line_has_the_tokens_and_when_the_first_came(
    server: Server, route: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    limit = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    own = {"options": {"num_predict": 7}} if route == "/api/chat" else {limit: 7}
    response = httpx.post(
        server.url + route, json={**BODIES[route], "stream": stream, **own}, timeout=60
    )
    assert response.status_code == 200
    assert server.becomes(lambda _: bool(lines(caplog)))
    (line,) = lines(caplog)
    assert line["status"] == 200 and line["tokens"] == 7 and 0 < line["ttft"] < line["seconds"]
    assert line["bytes"] >= len(response.content)


def test_lines_of_text_have_the_same(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    text = request_log.TextLines(request_log.access, "")
    facts = {"remote": "::1", "method": "POST", "path": "/a\n", "status": 499, "bytes": 5,
             "seconds": 1.5, "request_id": None, "ttft": 0.25, "tokens": 3}  # fmt: skip
    text.write(facts)
    text.write({**facts, "ttft": None, "tokens": None})
    first, second = (record.message for record in caplog.records)
    assert first == r'::1 "POST /a\n" 499 5 bytes 1.500 s - ttft 0.250 s tokens 3'
    assert second == r'::1 "POST /a\n" 499 5 bytes 1.500 s - ttft - tokens -'


# ---------------------------------------------------------------- metrics


def requests(server: Server) -> dict[tuple[str, str, str], float]:
    """(handler, method, status) → count."""
    text = httpx.get(server.url + "/metrics").text
    return {
        (sample.labels["handler"], sample.labels["method"], sample.labels["status"]): sample.value
        for family in prometheus_client.parser.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "http_requests_total"
    }


def test_requests_are_counted_by_route_and_status(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    before = requests(server)
    post, complete = "POST", "/v1/completions"
    body = {"prompt": "x", "max_tokens": 1}
    httpx.post(server.url + complete, json=body)
    httpx.post(server.url + complete, json={**body, "stream": True})
    httpx.post(server.url + complete, json={"prompt": 5})
    httpx.get(server.url + complete)
    for number in range(30):
        httpx.get(f"{server.url}/unknown/{number}")
        httpx.get(f"{server.url}/v1/responses/resp_{number}")
    leave(server, "/v1/chat/completions", {**BODIES["/v1/chat/completions"], "stream": True})
    assert server.becomes(lambda _: any(line["status"] == 499 for line in lines(caplog)))
    after = requests(server)
    assert {key: count - before.get(key, 0) for key, count in after.items()} == {
        **dict.fromkeys(before, 0),
        (complete, post, "2xx"): 2,
        (complete, post, "4xx"): 1,
        ("none", "GET", "4xx"): 31,
        ("/v1/responses/{response_id}", "GET", "4xx"): 30,
        ("/v1/chat/completions", post, "4xx"): 1,
        ("/metrics", "GET", "2xx"): 1,
    }


def test_paths_that_are_named_get_no_line(caplog: pytest.LogCaptureFixture) -> None:
    options = ServerOptions(access_log="json", access_log_except=("/health,/metrics", "/version"))
    with running(engine_config(EMBEDDED_MODEL), options) as quiet:
        for path in ("/health", "/metrics", "/version", "/v1/models", "/healthy"):
            httpx.get(quiet.url + path)
    assert [line["path"] for line in lines(caplog)] == ["/v1/models", "/healthy"]

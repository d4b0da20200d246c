"""`jackfield serve --api-server-count 2` as processes: clients see what one process shows."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import httpx
import openai
import pytest
import transformers
from adapters_made import make_adapter
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, running

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.make_core import make_core
from jackfield.core.remote.server import EngineServer
from jackfield.entrypoints.http.auth.api_keys import PREFIX, digest_of
from jackfield.entrypoints.server.frontends.launch_spec import engine_socket, stateful_socket
from jackfield.entrypoints.server.frontends.sockets import bound
from jackfield.entrypoints.server.frontends.supervisor import FrontEnds, FrontEndsFailed
from jackfield.entrypoints.server.listen import Listen
from jackfield.entrypoints.server.serve_settings import settings
from jackfield.entrypoints.server.stateful_proxy import ASK_SECONDS, first_is_serving

MODEL = "jackfield-tiny"
FLAGS = (
    "--device", "cpu", "--attention-backend", "torch", "--max-model-len", "512",
    "--num-gpu-blocks-override", "400", "--max-num-seqs", "32",
)  # fmt: skip
CHAT = [{"role": "user", "content": "What is 2 + 3?"}]
LONG = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


class Fronted:
    """A server of several processes."""

    def __init__(self, process: subprocess.Popen[str], line: str, url: str, uds: str | None):
        self.process = process
        self.line = line
        self.url = url
        self.uds = uds
        self.trusted: ssl.SSLContext | bool = True
        self.headers: dict[str, str] = {}

    def client(self) -> httpx.Client:
        """One connection, kept: one front end."""
        transport = httpx.HTTPTransport(
            uds=self.uds,
            verify=self.trusted,
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1),
        )
        return httpx.Client(
            base_url=self.url, transport=transport, timeout=300, headers=self.headers
        )

    def front_of(self, client: httpx.Client) -> str:
        """Which front end a client's connection is with: the one that counts its request."""
        before = requests_of(self.metrics(client))
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).is_success
        after = requests_of(self.metrics(client))
        (grown,) = (front for front in after if after[front] > before.get(front, 0))
        return grown

    @contextlib.contextmanager
    def one_of_each(self) -> Iterator[list[httpx.Client]]:
        """A client of front end 0, and one of front end 1."""
        clients: dict[str, httpx.Client] = {}
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                client = stack.enter_context(self.client())
                clients.setdefault(self.front_of(client), client)
                if len(clients) == 2:
                    break
            yield [clients["0"], clients["1"]]

    def metrics(self, client: httpx.Client | None = None) -> dict[tuple[Any, ...], float]:
        with contextlib.ExitStack() as stack:
            connection = client or stack.enter_context(self.client())
            text = connection.get("/metrics").text
        return {
            (sample.name, *sorted((k, v) for k, v in sample.labels.items() if k != "model_name")): (
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def pids(self) -> dict[str, int]:
        """Of the front ends, by their numbers."""
        return {
            Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")[-1]: pid
            for pid in children(self.process.pid)
        }

    def idle(self) -> bool:
        samples = self.metrics()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(samples[f"jackfield:{name}",] == 0 for name in names)


def children(pid: int) -> list[int]:
    """Front-end processes of a server; the child of a grammar backend is none."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(item)
        for item in pids
        if "entrypoints.server.frontends" in Path(f"/proc/{item}/cmdline").read_text()
    ]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def requests_of(metrics: dict[tuple[Any, ...], float]) -> dict[str, float]:
    return {
        key[1][1]: value
        for key, value in metrics.items()
        if key[0] == "jackfield:frontend_requests_total"
    }


def becomes(condition: Callable[[], bool], seconds: float = 300) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def fronted(
    *flags: str,
    module: tuple[str, ...] | None = None,
    uds: str | None = None,
    environment: dict[str, str] | None = None,
) -> Any:
    command = module or ("-m", "jackfield.entrypoints.cli.main", "serve")
    listen = ("--uds", uds) if uds else ("--port", "0")
    process = forked.Tree(
        [sys.executable, *command, "--api-server-count", "2", *listen, *FLAGS, *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"https?://127\.0\.0\.1:\d+", line)
        assert match or (uds and uds in line), process.communicate()[1]
        yield Fronted(process, line, match[0] if match else "http://server", uds)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    folder = tmp_path_factory.mktemp("batches")
    profiles = str(tmp_path_factory.mktemp("profiles"))
    flags = (
        "--batch-dir", str(folder), "--enable-admin",
        "--profiler-config.torch-profiler-dir", profiles,
    )  # fmt: skip
    with fronted(*flags, environment={forked.START_SECONDS: "1"}) as running_server:
        yield running_server


@pytest.fixture(scope="module")
def single() -> Iterator[Server]:
    """The same model in one process."""
    config = EngineConfig(
        served_model_name=(MODEL,), device="cpu", attention_backend="torch", max_model_len=512,
        num_gpu_blocks_override=400, reasoning_parser="think_tags", tool_call_parser="hermes",
    )  # fmt: skip
    with running(config) as running_server:
        yield running_server


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": CHAT, "temperature": 0, "max_tokens": 20}),
    "two answers with log-probabilities": (
        "/v1/chat/completions",
        {"messages": CHAT, "n": 2, "seed": 5, "logprobs": True, "top_logprobs": 2,
         "max_tokens": 20},
    ),
    "tools": (
        "/v1/chat/completions",
        {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "temperature": 0,
         "max_tokens": 60},
    ),
    "schema": (
        "/v1/chat/completions",
        {"messages": CHAT, "temperature": 0, "max_tokens": 60, "response_format": {
            "type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {
                "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}}}},
    ),
    "stop string": ("/v1/completions", {"prompt": "1 2 3 4 5 6", "stop": ["9"], "temperature": 0}),
    "echo": (
        "/v1/completions",
        {"prompt": "Hello", "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0},
    ),
}  # fmt: skip


def folded(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """A stream put together, and the usage at its end."""
    choices: dict[int, dict[str, Any]] = {}
    usage: Any = None
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=request) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for event in map(json.loads, lines):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            first = choices.setdefault(choice["index"], {"logprobs": []})
            for name, value in (choice.get("delta") or {"text": choice.get("text")}).items():
                if isinstance(value, str) and name != "role":
                    first[name] = first.get(name, "") + value
                for call in value if name == "tool_calls" and value else ():
                    calls = first.setdefault("calls", {}).setdefault(call["index"], "")
                    first["calls"][call["index"]] = (
                        calls
                        + call["function"].get("name", "")
                        + (call["function"].get("arguments") or "")
                    )
            first["logprobs"].append(choice.get("logprobs"))
            first["finish"] = choice.get("finish_reason") or first.get("finish")
    for first in choices.values():
        first["logprobs"] = merged_logprobs(first["logprobs"])
    if usage:
        usage.pop("prompt_tokens_details", None)
    return choices, usage


def merged_logprobs(pieces: list[Any]) -> Any:
    merged: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, values in (piece or {}).items():
            merged.setdefault(name, []).extend(values or ())
    return merged


def test_streams_are_those_of_one_process_whichever_front_end_answers(
    server: Fronted, single: Server
) -> None:
    with server.one_of_each() as clients, httpx.Client(base_url=single.url, timeout=300) as alone:
        for name, (path, body) in ASKED.items():
            expected = folded(alone, path, body)
            for client in clients:
                assert folded(client, path, body) == expected, name
            whole = [first.post(path, json=body).json() for first in (alone, *clients)]
            texts = [
                [choice.get("message", {}).get("content") or choice.get("text")
                 for choice in first["choices"]]
                for first in whole
            ]  # fmt: skip
            assert texts[0] == texts[1] == texts[2], name


def test_the_ready_line_tells_how_many_answer(server: Fronted) -> None:
    assert server.line.endswith("s, 2 front ends\n")
    assert len(children(server.process.pid)) == 2


def test_the_kernel_spreads_connections_that_come_at_once(server: Fronted) -> None:
    before = requests_of(server.metrics())
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(server.client()) for _ in range(40)]
        for client in clients:
            client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    after = requests_of(server.metrics())
    shares = [after[front] - before[front] for front in "01"]
    assert sum(shares) == 40
    # 40 fair coins fall 5 to 35 or worse once in a million times.
    assert min(shares) > 4


def test_a_scrape_is_the_same_whichever_front_end_answers(server: Fronted) -> None:
    with server.one_of_each() as clients:
        first, other = (server.metrics(client) for client in clients)
    assert first.keys() == other.keys()
    changed = {key for key in first if first[key] != other[key]}
    scrapes = ("http_requests_total", ("handler", "/metrics"), ("method", "GET"), ("status", "2xx"))
    assert other[scrapes] == first[scrapes] + 1  # The first scrape itself.
    changed -= {key for key in changed if ("handler", "/metrics") in key}
    assert {key[0] for key in changed} <= {"jackfield:frontend_cpu_seconds_total"}
    assert first["jackfield:generation_tokens_total",] > 0
    assert set(requests_of(first)) == {"0", "1"}


def test_the_load_is_the_whole_servers(server: Fronted) -> None:
    with server.one_of_each() as clients, contextlib.ExitStack() as stack:
        for client in clients:
            stack.enter_context(client.stream("POST", "/v1/completions", json=LONG))
        with server.client() as asking:
            assert asking.get("/load").json() == {"server_load": 2}
    assert becomes(server.idle)


def test_admin_routes_and_health_reach_the_engine(server: Fronted) -> None:
    with server.one_of_each() as clients:
        for client in clients:
            assert client.get("/health").status_code == 200
            assert client.post("/reset_prefix_cache").status_code == 200
            assert client.get("/server_info").json()["num_blocks"] == 400
        cards = [client.get("/v1/models").json() for client in clients]
        assert cards[0] == cards[1]
        assert clients[0].get("/openapi.json").json() == clients[1].get("/openapi.json").json()


def test_responses_are_one_store_whichever_front_end_answers(server: Fronted) -> None:
    with server.one_of_each() as clients:
        zero, item = (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", http_client=client)
            for client in clients
        )
        first = item.responses.create(model=MODEL, input="My name is Ada.", max_output_tokens=8)
        assert zero.responses.retrieve(first.id).output_text == first.output_text
        second = zero.responses.create(
            model=MODEL, input="Hi", previous_response_id=first.id, max_output_tokens=8
        )
        items = item.responses.input_items.list(second.id, order="asc").data
        assert len(items) == 3
        events = list(
            item.responses.create(model=MODEL, input="Hi", stream=True, max_output_tokens=8)
        )
        kinds = [event.type for event in events]
        assert kinds[0] == "response.created"
        assert kinds[-1] in ("response.incomplete", "response.completed")
        running = zero.responses.create(
            model=MODEL, input="x", background=True, max_output_tokens=300,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert item.responses.retrieve(running.id).status in ("queued", "in_progress")
        assert item.responses.cancel(running.id).status == "cancelled"
        item.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            zero.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as refused:
            item.responses.create(model=MODEL, input="x", previous_response_id="resp_none")
        assert refused.value.code == "previous_response_not_found"


def test_a_target_that_is_a_whole_url_reaches_either_front_end(server: Fronted) -> None:
    """As proxies send it (absolute-form): stored responses are with the first one."""
    with server.one_of_each() as clients:
        created = clients[0].post("/v1/responses", json={"input": "x", "max_output_tokens": 2})
        path = f"/v1/responses/{created.json()['id']}/input_items?limit=1"
        for client in clients:
            for target in (f"http://localhost{path}", path):
                response = client.get(path, extensions={"target": target.encode()})
                assert response.status_code == 200, target
                assert len(response.json()["data"]) == 1


def test_leaving_a_forwarded_stream_aborts_its_request(server: Fronted) -> None:
    with server.one_of_each() as clients:
        body = {"input": "x", "max_output_tokens": 300, "ignore_eos": True, "stream": True}
        with clients[1].stream("POST", "/v1/responses", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            assert next(lines) == "event: response.created"
            assert not server.idle()
    assert becomes(server.idle)


def test_a_packed_body_is_unpacked_once(server: Fronted) -> None:
    body = gzip.compress(json.dumps({"input": "x", "max_output_tokens": 2}).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    with server.one_of_each() as clients:
        for client in clients:
            response = client.post("/v1/responses", content=body, headers=headers)
            assert response.status_code == 200, response.text
            assert response.headers["X-Request-Id"]


def test_files_and_batches_are_one_store_whichever_front_end_answers(server: Fronted) -> None:
    lines = b"".join(
        json.dumps(
            {"custom_id": f"a{number}", "method": "POST", "url": "/v1/completions",
             "body": {"prompt": "x", "max_tokens": 3}}
        ).encode() + b"\n" for number in range(5)
    )  # fmt: skip
    with server.one_of_each() as clients:
        zero, first = (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", http_client=client)
            for client in clients
        )
        file = first.files.create(file=("in.jsonl", lines), purpose="batch")
        batch = zero.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        assert becomes(lambda: first.batches.retrieve(batch.id).status == "completed")
        final = first.batches.retrieve(batch.id)
        output = first.files.content(final.output_file_id or "").read()
        assert len(output.splitlines()) == 5
        assert output == zero.files.content(final.output_file_id or "").read()
        refused = clients[1].get("/v1/batches?limit=zero")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")


@pytest.mark.parametrize("front", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_killed_front_end_takes_its_streams_alone_and_is_restarted(
    server: Fronted, front: str
) -> None:
    pids = server.pids()
    with server.one_of_each() as clients, contextlib.ExitStack() as stack:
        lost, original = (clients[int(front)], clients[1 - int(front)])
        asking = stack.enter_context(server.one_of_each())[1 - int(front)]
        streams = [
            stack.enter_context(client.stream("POST", "/v1/completions", json=LONG))
            for client in (lost, original)
        ]
        lines = [stream.iter_lines() for stream in streams]
        for some in lines:
            next(some)
        os.kill(pids[front], signal.SIGKILL)
        if front == "0":
            assert becomes(lambda: not alive(pids[front]))
            refused = asking.get("/v1/responses/resp_1")
            assert (refused.status_code, "being restarted" in refused.text) == (503, True)
        with pytest.raises(httpx.TransportError):
            list(lines[0])
        rest = [line for line in lines[1] if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) > 200
    # Clients wait for it in its socket's queue; nobody is refused.
    with server.one_of_each() as clients:
        for client in clients:
            assert client.get("/health").status_code == 200
        response = clients[1].post("/v1/responses", json={"input": "x", "max_output_tokens": 2})
        assert response.status_code == 200, response.text
    assert becomes(server.idle)
    assert server.pids().values() != pids.values() and len(server.pids()) == 2
    assert alive(server.process.pid) and not alive(pids[front])


def test_a_terminated_front_end_finishes_its_streams_first(server: Fronted) -> None:
    pids = children(server.process.pid)
    with server.one_of_each() as clients, contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(client.stream("POST", "/v1/completions", json=LONG))
            for client in clients
        ]
        lines = [stream.iter_lines() for stream in streams]
        for some in lines:
            next(some)
        os.kill(pids[0], signal.SIGTERM)
        for some in lines:
            rest = [line for line in some if line]
            assert rest[-1] == "data: [DONE]" and '"length"' in "".join(rest)
    assert becomes(lambda: not alive(pids[0]))
    with server.one_of_each() as clients:
        assert all(client.get("/health").status_code == 200 for client in clients)


def test_sigterm_drains() -> None:
    with fronted() as server:
        pids = children(server.process.pid)
        with server.client() as client, server.client() as other:
            with client.stream("POST", "/v1/completions", json=LONG) as response:
                lines = response.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                assert server.process.stdout.readline() == "Draining\n"
                refused = other.post("/v1/completions", json={"prompt": "x"})
                assert refused.status_code == 503, refused.text
                assert other.get("/health").status_code == 503
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"length"' in "".join(rest)
        assert server.process.wait(300) == 0
        assert becomes(lambda: not any(map(alive, pids)))


def test_nothing_is_left_of_a_server_whose_engine_is_killed(tmp_path: Path) -> None:
    """Over a Unix socket, which all front ends share."""
    uds = str(tmp_path / "server")
    with fronted(uds=uds, environment={"TMPDIR": str(tmp_path)}) as server:
        pids = children(server.process.pid)
        (folder,) = tmp_path.glob("jackfield-*")
        assert folder.stat().st_mode & 0o777 == 0o700
        with server.client() as client:
            with client.stream("POST", "/v1/completions", json=LONG) as response:
                lines = response.iter_lines()
                next(lines)
                server.process.kill()
                rest = "".join(lines)
        assert "the engine's process has ended" in rest and rest.endswith("data: [DONE]")
        assert becomes(lambda: not any(map(alive, pids)))
        assert not folder.exists()


DYING = """
import sys
from jackfield.entrypoints.server.event_loop import run_on_loop
from jackfield.entrypoints.server.serve_settings import settings
from jackfield.entrypoints.server.frontends.supervisor import serve_fronts
from jackfield.plugins.executors.inprocess import InProcessExecutor

class Dying(InProcessExecutor):
    steps = 0
    def ask(self, job):
        raise NotImplementedError
    def submit(self, plan, in_process):
        self.steps += 1
        if self.steps > 20:
            raise RuntimeError("the device is gone")
        return super().submit(plan, in_process)

found = settings(sys.argv[1:])
found.plugins["executor"].add("dying", Dying)
sys.exit(run_on_loop(serve_fronts(found)))
"""


def test_an_engine_that_dies_ends_the_streams_and_the_server_with_a_status(tmp_path: Path) -> None:
    """Over TLS, where openssl can make a certificate."""
    file, flags = str(tmp_path / "both.pem"), ()
    if shutil.which("openssl"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
             "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
             "subjectAltName=IP:127.0.0.1", "-keyout", file, "-out", file + ".crt"],
            check=True, capture_output=True,
        )  # fmt: skip
        flags = ("--ssl-keyfile", file, "--ssl-certfile", file + ".crt")
    with fronted("--executor", "dying", *flags, module=("-c", DYING)) as server:
        if flags:
            assert server.url.startswith("https://")
            server.trusted = ssl.create_default_context(cafile=file + ".crt")
        pids = children(server.process.pid)
        with server.client() as client:
            with client.stream("POST", "/v1/completions", json=LONG) as response:
                lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert any("the device is gone" in line or '"error"' in line for line in lines)
        assert server.process.wait(300) == 1
        assert becomes(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--api-server-count", "0"], "must be at least 1"),
        (["--api-server-count", "2", "no/such/folder"], "no/such/folder"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(flags: list[str], text: str) -> None:
    completed = forked.run(
        [sys.executable, "-m", "jackfield.entrypoints.cli.main", "serve", "--port", "0", *flags],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert completed.returncode != 0
    assert text in completed.stderr and "Traceback" not in completed.stderr


def test_each_front_end_has_a_socket_of_its_own_on_one_port() -> None:
    with bound(Listen("localhost", 0), 3) as sockets:
        addresses = {item.getsockname()[:2] for own in sockets for item in own}
        assert len({port for _, port in addresses}) == 1
        for own in sockets:
            for item in own:
                item.listen()
        port = addresses.pop()[1]
        with pytest.raises(OSError, match="in use"), bound(Listen("localhost", port), 2):
            pass
    with bound(Listen("localhost", port), 2) as sockets:
        assert sockets[0][0].getsockname()[1] == port
    with pytest.raises(OSError, match="assign requested"), bound(Listen("192.0.2.1", 0), 2):
        pass


def test_a_unix_socket_takes_the_place_of_one_that_was_left_and_of_nothing_else(
    tmp_path: Path,
) -> None:
    path = tmp_path / "server"
    with socket.socket(socket.AF_UNIX) as remaining:
        remaining.bind(str(path))
    with bound(Listen(uds=str(path)), 2) as ((item,), (other,)):
        assert item is other and path.is_socket()
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(OSError), bound(Listen(uds=str(path)), 2):
        pass
    assert path.read_text() == "a file"


async def test_front_ends_that_keep_ending_are_not_started_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    options = settings(["--api-server-count", "2", *FLAGS])
    async with AsyncEngine(options.config, plugins=options.plugins) as engine:
        with bound(Listen(port=0), 2) as sockets:
            fronts = FrontEnds(engine, options, str(tmp_path), sockets)
            with pytest.raises(FrontEndsFailed, match="at its start"):
                await asyncio.wait_for(fronts.run(), 300)
            fronts = FrontEnds(engine, options, str(tmp_path), sockets)
            fronts.complete = True
            with pytest.raises(FrontEndsFailed, match="ended 6 times within 60 seconds"):
                await asyncio.wait_for(fronts.run(), 300)
            fronts = FrontEnds(engine, options, str(tmp_path), sockets)
            fronts.complete = True
            engine.core.requests.accepting = False
            await asyncio.wait_for(fronts.run(), 300)
            assert len(fronts._restarts) == 0


def test_front_ends_take_the_flags_of_a_file_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("api-server-count: 3\nmax-num-seqs: 7\napi-key: [a b, c]\n")
    first = settings(["--config", str(path), "--port", "9"])
    path.unlink()
    again = settings(first.argv)
    assert (again.fronts, again.config.max_num_seqs, again.listen.port) == (3, 7, 9)
    assert again.options.api_keys[:2] == ("a b", "c")
    assert again.config == first.config


async def test_the_other_front_ends_wait_until_the_first_serves_files(tmp_path: Path) -> None:
    """A socket that a killed process has left is not one that is served."""
    path = tmp_path / "stateful"
    waiting = asyncio.create_task(first_is_serving(path))
    _, pending = await asyncio.wait({waiting}, timeout=3 * ASK_SECONDS)
    assert pending
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    _, pending = await asyncio.wait({waiting}, timeout=3 * ASK_SECONDS)
    assert pending and path.exists()
    path.unlink()
    async with await asyncio.start_unix_server(lambda reader, writer: writer.close(), path):
        await asyncio.wait_for(waiting, 300)


async def test_a_front_end_listens_after_the_first_does(tmp_path: Path) -> None:
    options = settings(["--api-server-count", "2", *FLAGS])
    core = make_core(options.config, options.plugins)
    async with AsyncEngine(options.config, plugins=options.plugins, core=core) as engine:
        server = EngineServer(core)
        server.started()
        folder = str(tmp_path)
        with bound(Listen(port=0), 2) as sockets:
            async with server.listening(engine_socket(folder)):
                fronts = FrontEnds(engine, options, folder, sockets)
                process = await fronts._start(1)
                while not server.fronts:
                    await asyncio.sleep(0.01)
                listening = asyncio.create_task(server.all_listening(1))
                _, pending = await asyncio.wait({listening}, timeout=3)
                assert pending, "the first front end is not there"
                path = stateful_socket(folder)
                async with await asyncio.start_unix_server(lambda _, w: w.close(), path):
                    await asyncio.wait_for(listening, 300)
                server.close_fronts()
                await process.wait()


def test_an_adapter_that_one_front_end_loads_is_served_by_all(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL)
    path = make_adapter(model, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    # A tenant's rights go from one front end to the other, however long they are.
    names = ["x", *(f"{number:0256}" for number in range(999))]
    keys = tmp_path / "keys.jsonl"
    rights = {"manages_adapters": True, "adapters": names}
    keys.write_text(json.dumps({"name": "a", "digest": PREFIX + digest_of("a").hex(), **rights}))
    flags = ("--enable-lora", "--enable-admin", "--api-key-file", str(keys))
    with fronted(*flags, environment={forked.START_SECONDS: "1"}) as server:
        server.headers["Authorization"] = "Bearer a"
        with server.one_of_each() as (zero, first):
            body = {"lora_name": "x", "lora_path": str(path)}
            assert zero.post("/v1/load_lora_adapter", json=body).status_code == 200
            texts = set()
            for client, model_name in ((zero, "x"), (first, "x"), (first, MODEL)):
                body = {"model": model_name, "input": "What?", "max_output_tokens": 8}
                answer = client.post("/v1/responses", json={**body, "temperature": 0}).json()
                assert answer["model"] == model_name
                texts.add(json.dumps([item.get("content") for item in answer["output"]]))
            assert len(texts) == 2
            assert first.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).is_success
            for client in (zero, first):
                assert client.get("/v1/models/x").status_code == 404


def test_a_profile_of_the_engines_process_is_begun_and_ended_at_any_front_end(
    server: Fronted,
) -> None:
    def post(route: str, **body: Any) -> httpx.Response:
        # Each call is a new connection, to one of both.
        return httpx.post(server.url + route, json=body or None, timeout=60)

    assert post("/start_profile").status_code == 200
    refused = post("/start_profile")
    assert refused.status_code == 400 and "runs already" in refused.text
    assert post("/v1/completions", model=MODEL, prompt="x", max_tokens=3).status_code == 200
    [trace] = post("/stop_profile").json()["traces"]
    with gzip.open(trace) as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert "publish" in names and any(name.startswith("aten::") for name in names)

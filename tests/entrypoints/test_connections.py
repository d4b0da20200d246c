"""How long a connection may take, how many there may be, and responses to what is no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import forked
import httpx
import pytest
import uvloop
from serving import Server, engine_config, running, save_random

from jackfield.entrypoints.http import connections, descriptors
from jackfield.entrypoints.http.connection_limits import ConnectionLimits
from jackfield.entrypoints.http.options import ServerOptions

HOST = b"Host: 127.0.0.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
LIMITS = ConnectionLimits(
    header_seconds=0.3, body_seconds=0.3, idle_seconds=0.3, send_seconds=0.3, max_connections=4
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with running(engine_config(checkpoint), ServerOptions(connections=LIMITS)) as running_server:
        yield running_server


@contextlib.contextmanager
def connected(server: Server, data: bytes = b"") -> Iterator[socket.socket]:
    at = urlsplit(server.url)
    with socket.create_connection((at.hostname, at.port), timeout=60) as connection:
        connection.sendall(data)
        yield connection


def rest(connection: socket.socket) -> bytes:
    """All until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def answered(server: Server, data: bytes) -> tuple[int, dict[str, Any]]:
    """→ status and error of the first response; the server closes the connection."""
    with connected(server, data) as connection:
        head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


# ---------------------------------------------------------------- time


@pytest.mark.parametrize("data", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\n" + HOST])
def test_a_connection_whose_headers_do_not_come_is_closed(server: Server, data: bytes) -> None:
    status, error = answered(server, data)
    assert status == 408 and "headers did not come in time" in error["message"]


def test_headers_of_a_second_request_that_do_not_come_are_not_waited_for(server: Server) -> None:
    with connected(server, b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /hea")
        assert rest(connection).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Content-Length: 100\r\n\r\n{",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
)
def test_a_body_that_does_not_come_is_a_408(server: Server, data: bytes) -> None:
    status, error = answered(server, data)
    assert status == 408 and "the body did not come in time" in error["message"]


def test_a_body_that_comes_slowly_and_steadily_is_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    original = connections.Connection._body_late

    def counted(self: Any) -> None:
        looks.append(1)
        original(self)

    monkeypatch.setattr(connections.Connection, "_body_late", counted)
    body = json.dumps({"prompt": "x" * 20, "max_tokens": 1}).encode().ljust(1 << 16)
    head = b"%bContent-Length: %d\r\nConnection: close\r\n\r\n" % (POST, len(body))
    with connected(server, head) as connection:
        for start in range(0, len(body), 512):
            connection.sendall(body[start : start + 512])
            if len(looks) < 2:  # Each piece waits for a part of the limit, until it was looked at.
                server.becomes(lambda _: len(looks) >= 2, 0.02)
        assert rest(connection).startswith(b"HTTP/1.1 200 ")
    assert looks


def test_an_idle_connection_is_closed(server: Server) -> None:
    with connected(server, b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n") as connection:
        head, _, body = rest(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and body == b""


def test_a_client_that_reads_nothing_is_let_go(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[int] = []
    original = connections.Connection._send_late

    def counted(self: Any) -> None:
        late.append(1)
        original(self)

    monkeypatch.setattr(connections.Connection, "_send_late", counted)
    at = urlsplit(server.url)
    request = b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        connection.settimeout(60)
        connection.connect((at.hostname, at.port))
        with contextlib.suppress(ConnectionError, TimeoutError):
            for _ in range(400):
                connection.sendall(request)
        assert server.becomes(lambda _: bool(late))


# ---------------------------------------------------------------- how many


def test_silent_connections_exclude_no_client(checkpoint: Path) -> None:
    limits = ConnectionLimits(max_connections=4)
    with (
        running(engine_config(checkpoint), ServerOptions(connections=limits)) as server,
        contextlib.ExitStack() as stack,
    ):
        silent = [stack.enter_context(connected(server)) for _ in range(12)]
        assert httpx.get(server.url + "/health", timeout=60).status_code == 200
        assert [rest(item) for item in silent[:8]] == [b""] * 8, "the oldest ones were closed"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_connection_beyond_those_with_requests_is_refused_and_logged(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, run: Any
) -> None:
    limits = ConnectionLimits(max_connections=3)
    body = b'{"prompt":"x","max_tokens":400,"ignore_eos":true,"stream":true}'
    data = POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    with (
        running(engine_config(checkpoint), ServerOptions(connections=limits), run=run) as server,
        contextlib.ExitStack() as stack,
    ):
        busy = [stack.enter_context(connected(server, data)) for _ in range(3)]
        assert all(item.recv(100).startswith(b"HTTP/1.1 200") for item in busy)
        with connected(server) as refused:
            response = rest(refused)
        assert response.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: 1\r\n" in response
        assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["type"] == "overloaded_error"
        assert any("3 are open, each with a request" in r.message for r in caplog.records)
        for item in busy:
            item.close()
        assert server.becomes(lambda engine: not engine.stats().num_requests_running)
        assert httpx.get(server.url + "/health").status_code == 200


def test_a_warning_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    warning = connections.RepeatedWarning()
    for _ in range(1000):
        warning.warn("no descriptor is left")
    assert [r.message for r in caplog.records] == ["no descriptor is left"]


def test_the_lack_of_descriptors_is_noticed() -> None:
    assert descriptors.descriptors_left()
    code = (
        "import resource, os\n"
        "from jackfield.entrypoints.http.descriptors import descriptors_left\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        "try:\n"
        "    while True: os.dup(1)\n"
        "except OSError: print(descriptors_left())\n"
    )
    completed = forked.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert completed.stdout.strip() == "False", completed.stderr


async def test_the_lack_of_descriptors_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(descriptors, "descriptors_left", lambda: False)
    caplog.set_level(logging.WARNING)
    async with descriptors.watching_descriptors():
        while not caplog.records:
            await asyncio.sleep(0)
    assert "has no descriptor left" in caplog.records[0].message


def test_the_soft_limit_of_descriptors_is_raised() -> None:
    code = (
        "import resource\n"
        "from jackfield.entrypoints.http import descriptors\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "hard = min(hard, 4096)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))\n"
        "print(descriptors.max_connections())\n"
        "assert descriptors.raise_descriptors() == hard\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard\n"
        "print(descriptors.max_connections() == hard - descriptors.RESERVED)\n"
    )
    completed = forked.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert completed.stdout.split() == ["256", "True"], completed.stderr


# ---------------------------------------------------------------- what is no HTTP


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"BREW /health HTTP/1.1\r\n" + HOST + b"\r\n", 501, "method is unknown"),
        (b"GET /health HTTP/9.9\r\n" + HOST + b"\r\n", 400, "the request is malformed"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 400, "the request is malformed"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 501, "method is unknown"),
    ],
)
def test_what_is_no_http_gets_an_error_body(
    server: Server, data: bytes, status: int, message: str
) -> None:
    actual, error = answered(server, data)
    assert actual == status and message in error["message"] and error["code"] == status


def test_an_unknown_expectation_gets_an_error_body(server: Server) -> None:
    response = httpx.post(server.url + "/v1/completions", headers={"Expect": "200-maybe"}, json={})
    assert response.status_code == 417
    assert response.json()["error"] == {
        "message": "Unknown Expect: 200-maybe", "type": "invalid_request_error",
        "param": None, "code": 417,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Expect: \xff", 417),
        (b"Content-Type: \xff/json", 415),
        (b"Content-Encoding: \xff", 415),
    ],
)
def test_bytes_of_a_header_that_are_no_text_are_refused_and_not_logged_as_a_failure(
    server: Server, header: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    start = POST if b"Type" not in header else b"POST /v1/completions HTTP/1.1\r\n" + HOST
    end = b"\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    found, error = answered(server, start + header + end)
    assert found == status and error["message"]
    assert "Traceback" not in caplog.text and "failed" not in caplog.text


def test_a_body_that_turns_bad_in_its_middle_is_answered(server: Server) -> None:
    with connected(server, POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n") as connection:
        assert server.becomes(lambda _: True)  # The server's loop has seen the headers.
        connection.sendall(b"no size\r\n")
        response = rest(connection)
    # aiohttp answers by HTTP/1.0 where it has not parsed the headers yet.
    status = response.partition(b" ")[2]
    assert status.startswith(b"400 "), "and not silence, until the body's time is over"
    assert response.count(b"HTTP/1.") == 1


def test_a_connection_leaves_nothing_behind(server: Server) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with connected(server, b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"):
            pass
    assert server.becomes(lambda _: len(os.listdir("/proc/self/fd")) <= before)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before

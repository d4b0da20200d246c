"""TLS handshakes are connections: bounded in number and in time, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web

from jackfield.entrypoints.http.connection_limits import ConnectionLimits
from jackfield.entrypoints.http.connections import Connections
from jackfield.entrypoints.http.runner import Runner
from jackfield.entrypoints.http.tls import Tls

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
WAIT = GET.replace(b"health", b"wait")
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(path), "-out",
         f"{path}.crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@contextlib.asynccontextmanager
async def serving(certificate: Path, **limits: Any) -> AsyncIterator[tuple[int, Connections]]:
    """→ port, and the connections that the server counts."""

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="fine")

    async def wait(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/wait", wait)])
    runner = Runner(
        app, ConnectionLimits(**limits), tls=Tls(str(certificate)).context(), shutdown_timeout=0.1
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1], runner.open
    finally:
        await runner.cleanup()


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=f"{certificate}.crt")


async def opened(
    port: int, certificate: Path, data: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("localhost", port, ssl=trusting(certificate),
                                                   family=socket.AF_INET)  # fmt: skip
    writer.write(data)
    return reader, writer


async def silent(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that never begins its handshake."""
    return await asyncio.open_connection("127.0.0.1", port)


@LOOPS
def test_requests_are_served_after_a_handshake(run: Run, certificate: Path) -> None:
    async def check() -> None:
        async with serving(certificate) as (port, open):
            for _ in range(5):  # The request may come in the same packet as the handshake's end.
                reader, writer = await opened(port, certificate, GET)
                for _ in range(2):
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 200 ")
                    assert await reader.readexactly(4) == b"fine"
                    writer.write(GET)
                writer.close()
            while len(open):
                await asyncio.sleep(0)

    run(check())


@LOOPS
@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02\x00\x01\x00"])
def test_a_handshake_that_does_not_end_is_closed_after_the_headers_time(
    run: Run, certificate: Path, data: bytes
) -> None:
    async def check() -> None:
        async with serving(certificate, header_seconds=0.2) as (port, open):
            reader, writer = await silent(port)
            writer.write(data)
            while not len(open):
                await asyncio.sleep(0)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 300) == b""
            assert not len(open)
            writer.close()

    run(check())


@LOOPS
def test_handshakes_that_do_not_end_exclude_no_client(run: Run, certificate: Path) -> None:
    async def check() -> None:
        async with serving(certificate, max_connections=4) as (port, open):
            clients = [await silent(port) for _ in range(12)]
            reader, writer = await opened(port, certificate, GET)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            assert len(open) <= 4
            for early, _ in clients[:8]:
                with contextlib.suppress(ConnectionError):
                    assert await early.read() == b""
            for _, one in [*clients, (reader, writer)]:
                one.close()

    run(check())


@LOOPS
def test_a_handshake_beyond_connections_with_requests_is_closed(
    run: Run, certificate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        async with serving(certificate, max_connections=2) as (port, open):
            busy = [await opened(port, certificate, WAIT) for _ in range(2)]
            while any(connection.idle for connection in open._open):
                await asyncio.sleep(0)
            with pytest.raises((ConnectionError, ssl.SSLError)):
                await opened(port, certificate, GET)
            assert len(open) == 2
            for _, writer in busy:
                writer.close()
            while len(open):
                await asyncio.sleep(0)
            reader, writer = await opened(port, certificate, GET)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()

    run(check())
    assert any("2 are open, each with a request" in r.message for r in caplog.records)


@LOOPS
def test_what_is_no_tls_is_closed(run: Run, certificate: Path) -> None:
    async def check() -> None:
        async with serving(certificate) as (port, open):
            reader, writer = await silent(port)
            writer.write(GET)
            with contextlib.suppress(ConnectionError):
                assert b"200" not in await reader.read()
            assert not len(open)
            writer.close()

    run(check())

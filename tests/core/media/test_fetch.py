"""What a server reads for its clients: from public hosts that are named, and files of a folder."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from jackfield.core.errors import InvalidRequest
from jackfield.core.media import fetch
from jackfield.core.media.fetch import ANY, MediaFetcher, is_public

FIELD = "messages[0].content[1].image_url.url"


def test_public_addresses() -> None:
    for address in (
        "127.0.0.1", "10.0.0.1", "172.16.5.4", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "255.255.255.255", "224.0.0.1", "::1", "::", "fe80::1%eth0", "fc00::1",
        "::ffff:10.0.0.1", "::ffff:127.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "ff02::1",
        "198.18.0.1", "192.0.2.1",
    ):  # fmt: skip
        assert not is_public(address), address
    for address in ("1.1.1.1", "8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8"):
        assert is_public(address), address


async def refused(fetcher: MediaFetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as error:
        await fetcher.read(url, FIELD)
    assert error.value.param == FIELD
    return error.value.message


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "0x7f.1", "2130706433", "[::1]", "[::ffff:10.0.0.1]", "localhost",
     "0.0.0.0", "169.254.169.254", "[fe80::1]"],
)  # fmt: skip
async def test_hosts_of_this_machine_or_network_are_not_fetched(host: str) -> None:
    """However their address is written, and though all hosts are allowed."""
    message = await refused(MediaFetcher("", (ANY,)), f"http://{host}:9/a.png")
    assert "not public" in message or "InvalidUrl" in message


Handler = Callable[[web.Request], Any]


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    """A server on this machine, and its port."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


def of_this_machine(address: str) -> bool:
    return address == "127.0.0.1" or is_public(address)


async def test_a_host_that_is_named_is_read_and_another_is_not() -> None:
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append((request.path, request.headers["Host"]))
        if request.path == "/missing":
            return web.Response(status=404)
        return web.Response(body=b"picture")

    async with serving(handler) as port:
        fetcher = MediaFetcher("", ("LocalHost.",), allows=of_this_machine)
        assert await fetcher.read(f"http://localhost:{port}/a.png", FIELD) == b"picture"
        assert asked == [("/a.png", f"localhost:{port}")]
        assert "status 404" in await refused(fetcher, f"http://localhost:{port}/missing")
        for host in ("127.0.0.1", "localhost.example", "evil@localhost", "xlocalhost"):
            message = await refused(fetcher, f"http://{host}:{port}/b.png")
            assert "--allowed-media-domains" in message or "plain http" in message
        assert [path for path, _ in asked] == ["/a.png", "/missing"]
        closed = MediaFetcher("", (), allows=of_this_machine)
        assert "--allowed-media-domains" in await refused(closed, f"http://localhost:{port}/a")


async def test_every_hop_of_a_redirect_is_checked() -> None:
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path)
        target = "/loop" if request.path == "/loop" else request.query.get("to")
        if target is None:
            return web.Response(body=b"picture")
        return web.Response(status=302, headers={"Location": target})

    async with serving(handler) as port:
        fetcher = MediaFetcher("", (ANY,), allows=of_this_machine)
        here = f"http://127.0.0.1:{port}"
        assert await fetcher.read(f"{here}/1?to=/2", FIELD) == b"picture"
        for target in (
            "http://10.0.0.1/", "http://[::1]/", "file:///etc/passwd", "gopher://1.1.1.1/",
            "http://a:b@127.0.0.1/", "//169.254.169.254/latest",
        ):  # fmt: skip
            message = await refused(fetcher, f"{here}/?to={target}")
            assert "not public" in message or "plain http" in message, target
        asked.clear()
        assert "redirects" in await refused(fetcher, f"{here}/loop")
        assert len(asked) == fetch.REDIRECTS + 1


async def test_a_name_is_connected_to_at_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resolver that answers otherwise the second time is not asked twice."""
    loop = asyncio.get_running_loop()
    answers = []

    async def getaddrinfo(host: str, port: int, **options: Any) -> Any:
        address = "10.0.0.1" if not answers else "127.0.0.1"
        answers.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    fetcher = MediaFetcher("", (ANY,), allows=of_this_machine)
    assert "not public" in await refused(fetcher, "http://pictures.example/a.png")
    assert answers == ["pictures.example"]


async def test_a_body_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_BYTES", 1 << 18)
    sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"x" * (1 << 16))
                sent += 1 << 16
        return response

    async with serving(handler) as port:
        fetcher = MediaFetcher("", (ANY,), allows=of_this_machine)
        assert "MiB" in await refused(fetcher, f"http://127.0.0.1:{port}/")
    assert sent < 1 << 25


async def test_a_host_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "SECONDS", 0.05)
    left = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        await left.wait()
        return web.Response()

    async with serving(handler) as port:
        fetcher = MediaFetcher("", (ANY,), allows=of_this_machine)
        assert "within 0.05 seconds" in await refused(fetcher, f"http://127.0.0.1:{port}/")
        left.set()


class Counting(ThreadPoolExecutor):
    """Counts the calls that wait or run."""

    def __init__(self) -> None:
        super().__init__(2)
        self.now = self.most = 0

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.now += 1
        self.most = max(self.most, self.now)
        future = super().submit(*args, **kwargs)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[Any]) -> None:
        self.now -= 1


async def test_few_files_are_in_memory_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    threads = Counting()
    asyncio.get_running_loop().set_default_executor(threads)
    fetcher, url = MediaFetcher(str(tmp_path), ()), f"file://{tmp_path}/a.png"
    read = await asyncio.gather(*(fetcher.read(url, FIELD) for _ in range(4 * fetch.FETCHES)))
    assert read == [b"picture"] * 4 * fetch.FETCHES
    assert 0 < threads.most <= fetch.FETCHES


async def test_files_are_those_of_the_folder(tmp_path: Path) -> None:
    folder, other = tmp_path / "pictures", tmp_path / "secrets"
    folder.mkdir()
    other.mkdir()
    (folder / "a b.png").write_bytes(b"picture")
    (other / "key").write_bytes(b"secret")
    (folder / "link").symlink_to(other / "key")
    fetcher = MediaFetcher(str(folder), ())
    assert await fetcher.read(f"file://{folder}/a%20b.png", FIELD) == b"picture"
    for path in (
        f"{folder}/link", f"{folder}/../secrets/key", f"{other}/key", f"{folder}", "/etc/passwd",
        f"{folder}/none", f"{folder}/%2e%2e/secrets/key", "/dev/zero", f"{folder}/a\x00b",
    ):  # fmt: skip
        assert "no readable file" in await refused(fetcher, f"file://{path}")
    assert "no readable file" in await refused(fetcher, "file://host/etc/passwd")
    assert "--allowed-local-media-path" in await refused(MediaFetcher("", ()), "file:///etc/passwd")

"""The connector passes Jackfield's kit, against a server of its own."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from jackfield.core.errors import ConfigError
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.kv_connectors import Halves, KVConnectorKit, random_cache

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
pytestmark = pytest.mark.skipif(
    SERVER is None, reason="neither redis-server nor valkey-server is installed"
)


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server on a socket of its own, with nothing on disk. → (process, its URL)"""
    # The path of a socket is at most some 100 characters long, a test's own folder is longer.
    with tempfile.TemporaryDirectory(prefix="jf-redis-") as folder:
        socket = Path(folder) / "socket"
        options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
        process = subprocess.Popen(
            [str(SERVER), *options, "--dir", folder], stdout=subprocess.DEVNULL
        )
        try:
            _wait_for(socket, process)
            yield process, f"unix://{socket}"
        finally:
            process.kill()
            process.wait()


def _wait_for(socket: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(redis.ConnectionError):
            redis.Redis(unix_socket_path=str(socket)).ping()
            return
        time.sleep(0.01)
    raise RuntimeError("the server did not come up")


class TestRedis(KVConnectorKit):
    name = "redis"

    @pytest.fixture(autouse=True)
    def _started(self, server: tuple[subprocess.Popen[bytes], str]) -> None:
        self.process, self.url = server
        self.damages = False

    def extra_config(self, folder: Path) -> dict[str, Any]:
        return {"url": self.url}

    def break_far_side(self, folder: Path) -> None:
        if self.damages:
            client = redis.Redis.from_url(self.url)
            names = client.keys("jackfield:kv:*")
            assert names, "nothing was stored"
            for number, name in enumerate(names):
                data = client.get(name)
                client.set(name, data[: len(data) // 2] if number % 2 else data[:-1] + b"?")
        else:
            self.process.kill()
            self.process.wait()

    def test_damaged_values_are_never_used(self, tmp_path: Path) -> None:
        self.damages = True
        self.test_what_is_damaged_is_never_used(tmp_path)

    def test_blocks_expire_when_they_are_told_to(self, tmp_path: Path) -> None:
        client = redis.Redis.from_url(self.url)
        self.extra_config = lambda folder: {"url": self.url, "ttl_seconds": 77}
        self.test_an_engine_gets_back_what_it_has_lost(tmp_path)
        assert {0 < client.ttl(name) <= 77 for name in client.keys("*")} == {True}


def test_wrong_options_are_refused_by_name() -> None:
    for extra, word in (({"url": "http://x"}, "url"), ({"uri": ""}, "uri"),
                        ({"ttl_seconds": 0}, "ttl_seconds")):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            Halves("redis", extra, load_plugins(), [random_cache(4, 4, 1, 8, torch.float32)])

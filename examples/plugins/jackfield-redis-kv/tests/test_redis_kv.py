"""The connector passes Jackfield's kit, against a server that the tests bring along, and against
Redis or Valkey where one is installed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import redis
from serve_with import started

from jackfield.plugins.conformance.kv_connectors import KVConnectorKit

REDIS = shutil.which("redis-server") or shutil.which("valkey-server")


class TestRedis(KVConnectorKit):
    name = "redis"
    wrong_options = {"url": "http://x", "ttl_seconds": 0, "timeout_seconds": "soon"}

    def server(self) -> AbstractContextManager[Any]:
        return started()

    @pytest.fixture(autouse=True)
    def _started(self) -> Iterator[None]:
        self.damages = False
        with self.server() as (self.process, self.url):
            yield

    def extra_config(self, folder: Path) -> dict[str, Any]:
        return {"url": self.url, "timeout_seconds": 60}

    def damage(self, folder: Path) -> None:
        client = redis.Redis.from_url(self.url)
        names = client.keys("jackfield:kv:*")
        assert names, "nothing was stored"
        for number, name in enumerate(names):
            data = client.get(name)
            client.set(name, data[: len(data) // 2] if number % 2 else data[:-1] + b"?")

    def break_far_side(self, folder: Path) -> None:
        if self.damages:
            self.damage(folder)
        else:
            self.process.kill()
            self.process.wait()

    def test_damaged_values_are_never_used(self, tmp_path: Path) -> None:
        self.damages = True
        self.test_what_is_damaged_is_never_used(tmp_path)

    def test_blocks_expire_when_they_are_told_to(self, tmp_path: Path) -> None:
        client = redis.Redis.from_url(self.url)
        config = {**self.extra_config(tmp_path), "ttl_seconds": 77}
        self.extra_config = lambda folder: config
        self.test_an_engine_gets_back_what_it_has_lost(tmp_path)
        assert {0 < client.ttl(name) <= 77 for name in client.keys("*")} == {True}


@pytest.mark.skipif(REDIS is None, reason="neither redis-server nor valkey-server is installed")
class TestInstalledServer(TestRedis):
    def server(self) -> AbstractContextManager[Any]:
        options = ["--port", "0", "--save", "", "--appendonly", "no"]
        return started([str(REDIS), *options], ["--unixsocket"])

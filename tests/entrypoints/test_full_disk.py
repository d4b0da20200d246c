"""Files and batches on a disk without room: clear errors, and batches that go on when there is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server, engine_config, running, save_random

from jackfield.entrypoints.batch import manager, results, routes
from jackfield.entrypoints.batch.jsonl import Line, refused
from jackfield.entrypoints.batch.results import ResultsFile
from jackfield.entrypoints.batch.store import Store
from jackfield.entrypoints.http.options import BatchOptions, ServerOptions

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
COUNT = 12


class Disk:
    """A disk that takes so many more writes of results, or any number."""

    def __init__(self) -> None:
        self.room: int | None = None
        self.refused = 0
        self._pwrite = os.pwrite

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        if self.room is not None:
            if self.room == 0:
                self.refused += 1
                # As a disk does on its last block: a part of it.
                self._pwrite(fd, data[:10], offset)
                raise FULL
            self.room -= 1
        return self._pwrite(fd, data, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    fake_disk = Disk()
    monkeypatch.setattr(results.os, "pwrite", fake_disk.pwrite)
    monkeypatch.setattr(manager, "RETRY_SECONDS", 0.02)
    yield fake_disk
    fake_disk.room = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


stores: list[Store] = []
"""That of the server."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Server]:
    options = ServerOptions(batches=BatchOptions(folder))
    start = Store.start

    async def kept(self: Store) -> None:
        stores.append(self)
        await start(self)

    config = engine_config(save_random(tmp_path_factory.mktemp("random")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "start", kept)
        with running(config, options) as running_server:
            yield running_server


def upload(server: Server) -> httpx.Response:
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"say {i}", "max_tokens": 3, "ignore_eos": True},
        }
        for i in range(COUNT)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    files = {"file": ("in.jsonl", content), "purpose": (None, "batch")}
    return httpx.post(server.url + "/v1/files", files=files)


def start(server: Server) -> str:
    body = {
        "input_file_id": upload(server).json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    response = httpx.post(server.url + "/v1/batches", json=body)
    assert response.status_code == 200, response.text
    batch_id: str = response.json()["id"]
    return batch_id


def becomes(
    server: Server, batch: str, condition: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while True:
        seen: dict[str, Any] = httpx.get(f"{server.url}/v1/batches/{batch}").json()
        if condition(seen):
            return seen
        assert time.monotonic() < deadline, seen


def outputs(server: Server, batch: dict[str, Any]) -> list[dict[str, Any]]:
    response = httpx.get(f"{server.url}/v1/files/{batch['output_file_id']}/content")
    return [json.loads(line) for line in response.text.splitlines()]


def full(seen: dict[str, Any]) -> bool:
    errors = (seen["errors"] or {"data": []})["data"]
    return any(error["code"] == "insufficient_storage" for error in errors)


def test_a_batch_waits_for_room_says_so_and_goes_on(server: Server, disk: Disk) -> None:
    disk.room = 3
    batch = start(server)
    seen = becomes(server, batch, full)
    assert seen["status"] == "in_progress" and seen["request_counts"]["completed"] <= 3
    refused = disk.refused
    becomes(server, batch, lambda _: disk.refused > refused)  # It tries again.
    disk.room = None
    final = becomes(server, batch, lambda seen: seen["status"] == "completed")
    assert final["errors"] is None and final["request_counts"]["completed"] == COUNT
    rows = outputs(server, final)
    assert sorted(item["custom_id"] for item in rows) == sorted(f"r{i}" for i in range(COUNT))


def test_a_batch_that_waits_for_room_can_be_cancelled(server: Server, disk: Disk) -> None:
    disk.room = 2
    batch = start(server)
    becomes(server, batch, full)
    response = httpx.post(f"{server.url}/v1/batches/{batch}/cancel")
    assert response.status_code == 200 and response.json()["status"] == "cancelling"
    final = becomes(server, batch, lambda seen: seen["status"] == "cancelled")
    assert disk.room == 0 and len(outputs(server, final)) == 2


@pytest.mark.parametrize("method", ["put", "finish", "add_file"])
def test_rows_that_cannot_be_written_are_written_later(
    server: Server, disk: Disk, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """`put` is refused after a batch was created; `finish` and `add_file` in their first calls."""
    remaining = 3
    real = getattr(Store, method)

    def refusing(self: Store, thing: Any, *rest: Any) -> Any:
        nonlocal remaining
        new = getattr(thing, "status", "") == "validating"
        if remaining and not new and getattr(thing, "purpose", "") != "batch":
            remaining -= 1
            if method == "finish":
                real(self, thing, *rest)  # All of it, but for the end.
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return real(self, thing, *rest)

    monkeypatch.setattr(Store, method, refusing)
    batch = start(server)
    final = becomes(server, batch, lambda seen: seen["status"] == "completed")
    assert remaining == 0 and final["errors"] is None
    assert len(outputs(server, final)) == COUNT


def test_a_cancelled_batch_ends_though_its_row_could_not_be_written_at_once(
    server: Server, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.room = 0
    batch = start(server)
    becomes(server, batch, full)
    real, refused = Store.put, 0

    def refusing(self: Store, thing: Any, *rest: Any) -> Any:
        nonlocal refused
        if refused < 2:
            refused += 1
            raise FULL
        return real(self, thing, *rest)

    monkeypatch.setattr(Store, "put", refusing)
    assert httpx.post(f"{server.url}/v1/batches/{batch}/cancel").status_code == 200
    becomes(server, batch, lambda seen: seen["status"] == "cancelled")
    assert refused == 2


@pytest.mark.parametrize("place", ["content", "sync", "row"])
def test_an_upload_without_room_is_refused_clearly_and_leaves_nothing(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def refuse(*_: Any) -> Any:
        raise FULL

    before = sorted(folder.glob("*/*"))
    target = {"content": (routes, "_write"), "sync": (routes, "sync"), "row": (Store, "add_file")}
    monkeypatch.setattr(*target[place], refuse)
    response = upload(server)
    assert response.status_code == 507, response.text
    error = response.json()["error"]
    assert error["code"] == "insufficient_storage" and "disk is full" in error["message"]
    assert sorted(folder.glob("*/*")) == before
    monkeypatch.undo()
    assert upload(server).status_code == 200


def test_a_database_without_room_refuses_uploads_and_lets_files_be_deleted(
    server: Server, folder: Path
) -> None:
    (store,) = stores
    file_ids = [upload(server).json()["id"] for _ in range(3)]
    pages = server.call(lambda _: store.call(_limit_pages, store, None))
    try:
        while (response := upload(server)).status_code == 200:
            file_ids.append(response.json()["id"])
        assert response.status_code == 507
        assert response.json()["error"]["code"] == "insufficient_storage"
        assert not list((folder / "incoming").iterdir())
        for file_id in file_ids:
            assert httpx.delete(f"{server.url}/v1/files/{file_id}").status_code == 200
    finally:
        server.call(lambda _: store.call(_limit_pages, store, pages))
    assert upload(server).status_code == 200


def _limit_pages(store: Store, pages: int | None) -> int:
    """SQLite's own limit, one page over what there is, in place of a full disk → the old one."""
    (before,) = store._db.execute("PRAGMA max_page_count").fetchone()
    if pages is None:
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count={pages}")
    return int(before)


def test_a_line_that_does_not_fit_leaves_nothing_behind(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "results"
    file = ResultsFile(path)
    ids = [f"batch_req_{i}_{i:016x}" for i in range(3)]
    lines = [Line(i, id, f"r{i}", "/v1/completions", {}, None) for i, id in enumerate(ids)]
    refusals = [refused(line, "code", "x" * (200 - 90 * line.number)) for line in lines]
    file.append(refusals[0])
    disk.room = 0
    with pytest.raises(OSError):
        file.append(refusals[1])
    assert path.read_bytes() == refusals[0].encoded
    disk.room = None
    file.append(refusals[2])
    file.append(refusals[1])
    assert path.read_bytes() == refusals[0].encoded + refusals[2].encoded + refusals[1].encoded
    file.close()
    assert list(ResultsFile(path).done) == [refusals[i].line.id for i in (0, 2, 1)]


def test_a_folder_that_was_removed_is_used_again_once_it_is_there(
    server: Server, folder: Path
) -> None:
    known = upload(server).json()["id"]
    shutil.rmtree(folder)
    for refused_ in (upload(server), httpx.get(f"{server.url}/v1/files")):
        assert refused_.status_code == 503
        assert refused_.json()["error"]["code"] == "storage_failed"
        assert "their folder is gone" in refused_.json()["error"]["message"]
    assert not folder.exists(), "what is mounted there may be away for a moment"
    folder.mkdir()
    assert httpx.get(f"{server.url}/v1/files/{known}").status_code == 404
    batch = start(server)
    final = becomes(server, batch, lambda seen: seen["status"] == "completed")
    assert len(outputs(server, final)) == COUNT


def test_a_batch_whose_results_were_removed_has_failed(
    server: Server, folder: Path, disk: Disk
) -> None:
    disk.room = 3
    batch = start(server)
    becomes(server, batch, full)
    shutil.rmtree(folder)
    folder.mkdir()
    disk.room = None
    final = becomes(server, batch, lambda seen: seen.get("status") == "failed")
    (error,) = final["errors"]["data"]
    assert error["code"] == "storage_failed" and final["output_file_id"] is None

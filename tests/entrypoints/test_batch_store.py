"""The folder of files and batches after a kill at the worst moments."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from jackfield.core.errors import InvalidRequest
from jackfield.entrypoints.batch.jsonl import Line, Result, refused
from jackfield.entrypoints.batch.results import ResultsFile
from jackfield.entrypoints.batch.schemas import (
    Batch,
    Conflict,
    FileObject,
    NotFound,
    RequestCounts,
)
from jackfield.entrypoints.batch.store import Store


def opened(folder: Path, max_bytes: int = 1000) -> Store:
    store = Store(folder, max_bytes)
    store.open()
    return store


def stored(store: Store, content: bytes, file_id: str = "file-1", **facts: int) -> FileObject:
    path = store.incoming(file_id)
    path.write_bytes(content)
    file = FileObject(
        id=file_id,
        bytes=len(content),
        created_at=int(time.time()),
        filename="in.jsonl",
        purpose="batch",
        expires_at=facts.get("expires_at"),
    )
    store.add_file(file, path)
    return file


def batch(store: Store, status: str = "in_progress") -> Batch:
    record = Batch(
        id="batch_1",
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        created_at=0,
        expires_at=1 << 40,
    )
    record.turn(status)  # type: ignore[arg-type]
    store.put(record)
    return record


def result(number: int) -> Result:
    name = f"batch_req_{number}_{number:016x}"
    return refused(Line(number, name, f"c{number}", "", {}, None), "some_code", "text")


def modes(folder: Path) -> set[tuple[bool, int]]:
    """(whether it is a folder, mode) of all in a folder."""
    found = {(path.is_dir(), path.stat().st_mode & 0o777) for path in folder.rglob("*")}
    return found | {(True, folder.stat().st_mode & 0o777)}


@pytest.mark.parametrize("umask", [0, 0o022])
def test_the_folder_is_for_its_owner_alone(tmp_path: Path, umask: int) -> None:
    """Those that an earlier version made, too."""
    before = os.umask(umask)
    try:
        store = opened(tmp_path / "new")
        stored(store, b"x")
        first = batch(store)
        results = ResultsFile(store.results(first, "output"))
        results.append(result(1))
        results.put_in_order()
        assert (tmp_path / "new" / "batches.sqlite3-wal").exists()
        # `stored` writes its file itself; uploads are in tests/entrypoints/test_batches_api.py.
        store.content("file-1").chmod(0o600)
        assert modes(tmp_path / "new") == {(True, 0o700), (False, 0o600)}
        results.close()
        store.close()
        for path in (tmp_path / "new").rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        opened(tmp_path / "new").close()
        folder = tmp_path / "new"
        for name, mode in (
            ("files", 0o700), ("incoming", 0o700), ("results", 0o700), ("lock", 0o600),
            ("batches.sqlite3", 0o600),
        ):  # fmt: skip
            assert (folder / name).stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_files_fill_the_store_to_its_last_byte(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=1000)
    stored(store, b"x" * 999)
    stored(store, b"x", "file-2")
    with pytest.raises(InvalidRequest, match="keeps 1000 bytes at most"):
        stored(store, b"x", "file-3")


def test_a_kill_while_finalizing_loses_no_result(tmp_path: Path) -> None:
    store = opened(tmp_path)
    stored(store, b"x")
    first = batch(store)
    results = ResultsFile(store.results(first, "errors"))
    results.append(result(1))
    results.close()
    content = store.results(first, "errors").read_bytes()
    # The results became a file, and then the kill came: the batch is still in progress.
    first.turn("finalizing")
    store.put(first)
    finished = Batch(**{name: getattr(first, name) for name in first.__struct_fields__})
    finished.turn("completed")
    store.finish(finished)
    assert store.content(finished.error_file_id or "").read_bytes() == content
    store.put(first)
    store.close()
    store = opened(tmp_path)
    assert [record.id for record in store.unfinished()] == [first.id]
    assert store.results(first, "errors").read_bytes() == content
    assert [file.id for file in store.files(None, 10, False, None)] == ["file-1"]
    store.finish(finished)
    assert store.file(finished.error_file_id or "").bytes == len(content)
    store.close()


def test_halves_of_uploads_and_of_deletions_are_cleared_away(tmp_path: Path) -> None:
    store = opened(tmp_path)
    stored(store, b"kept")
    (tmp_path / "incoming" / "file-2").write_bytes(b"half")
    (tmp_path / "files" / "file-3").write_bytes(b"its row is gone")
    store.close()
    store = opened(tmp_path)
    assert list((tmp_path / "incoming").iterdir()) == []
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["file-1"]
    store.close()


def test_a_file_outlives_its_time_while_a_batch_reads_it(tmp_path: Path) -> None:
    store = opened(tmp_path)
    first = batch(store)
    stored(store, b"x", expires_at=1)
    assert store.file("file-1").bytes == 1
    with pytest.raises(Conflict, match="batch_1 still reads file-1"):
        store.delete_file("file-1")
    first.turn("cancelled")
    store.finish(first)
    with pytest.raises(NotFound):
        store.file("file-1")
    assert list((tmp_path / "files").iterdir()) == []
    store.close()


def test_a_full_store_takes_no_upload_but_every_result(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=10)
    stored(store, b"12345678")
    with pytest.raises(InvalidRequest, match="keeps 10 bytes at most"):
        stored(store, b"123", "file-2")
    first = batch(store)
    results = ResultsFile(store.results(first, "output"))
    results.append(result(1))
    results.close()
    first.turn("completed")
    store.finish(first)
    assert store.batch("batch_1").output_file_id is not None
    store.close()


def test_a_half_written_result_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultsFile(path)
    for number in (3, 1, 2):
        results.append(result(number))
    results.close()
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        again = ResultsFile(path)
        expected = whole[:cut].rpartition(b"\n")[0]
        assert len(again.done) == expected.count(b"\n") + bool(expected)
        assert path.read_bytes() == (expected + b"\n" if expected else b"")
        again.append(result(9))
        again.close()
        assert path.read_bytes() == (expected + b"\n" if expected else b"") + result(9).encoded


def test_results_are_put_in_order(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "out.jsonl")
    for number in (3, 10, 1, 2):
        results.append(result(number))
    results.put_in_order()
    results.close()
    expected = b"".join(result(number).encoded for number in (1, 2, 3, 10))
    assert (tmp_path / "out.jsonl").read_bytes() == expected


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    first = ResultsFile(tmp_path / "out.jsonl")
    with pytest.raises(InvalidRequest, match="another run writes to it"):
        ResultsFile(tmp_path / "out.jsonl")
    first.close()
    ResultsFile(tmp_path / "out.jsonl").close()


def test_of_a_new_batch_no_request_is_counted() -> None:
    counts = RequestCounts()
    assert (counts.total, counts.completed, counts.failed) == (0, 0, 0)

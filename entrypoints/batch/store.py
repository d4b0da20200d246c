"""Files and batches in a folder: rows in SQLite, contents in files next to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import fcntl
import hashlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from ...core.errors import ConfigError, InvalidRequest, shown
from ...core.recording.private_files import (
    make_given_folder,
    make_private_folder,
    private_opener,
    tighten,
)
from ...core.tenancy import ANYONE, Tenant
from .schemas import FINAL, Batch, Conflict, FileObject, NotFound
from .storage import FolderGone, StorageFailed, storage

logger = logging.getLogger("jackfield.server")
T = TypeVar("T")
VERSION = 2
SCHEMA = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, expires_at INTEGER, data BLOB NOT NULL, owner TEXT NOT NULL DEFAULT ''
);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, final INTEGER NOT NULL,
    data BLOB NOT NULL, owner TEXT NOT NULL DEFAULT '', tenant BLOB
);
"""
FROM_1 = """
ALTER TABLE files ADD COLUMN owner TEXT NOT NULL DEFAULT '';
ALTER TABLE batches ADD COLUMN owner TEXT NOT NULL DEFAULT '';
ALTER TABLE batches ADD COLUMN tenant BLOB;
"""
Part = str
"""`output` or `errors`: a batch's two files."""


class Store:
    """The files and batches of one server.

    Its methods run one at a time, on one thread. It chooses the names of files on the disk; a value
    from a client is only ever looked up in a row. With an `owner`, a method sees only that owner's
    rows (None: the server itself, which sees all).
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jackfield-batches")
        self._db: sqlite3.Connection
        self._lock: BinaryIO
        self._opened: tuple[int, int] | None = None
        """Device and inode of the open folder's lock; None if not open."""

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a method on the store's thread. Raises StorageFull, StorageFailed, or FolderGone if
        the folder was removed.
        """

        def work() -> T:
            with storage("files and batches"):
                if self._opened is not None:
                    self._find_folder()
                return function(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def open(self) -> None:
        try:
            make_given_folder(self.folder, "batch_dir")
            for name in ("files", "incoming", "results"):
                make_private_folder(self.folder / name)
            self._lock = self._private("lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # SQLite gives its other files the mode of this one.
            self._db = sqlite3.connect(self._private("batches.sqlite3"), isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={VERSION}; COMMIT;")
            elif version == 1:
                self._db.executescript(f"BEGIN; {FROM_1} PRAGMA user_version={VERSION}; COMMIT;")
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(f"batch_dir: another server uses {self.folder}") from None
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"batch_dir: {self.folder}: {error}") from None
        if version not in (0, 1, VERSION):
            raise ConfigError(
                f"batch_dir: {self.folder} is of version {version}, this one reads {VERSION}"
            )
        self._opened = _identity(self._lock.fileno())
        self._tidy()

    def _private(self, name: str) -> Path:
        """Return the path of an existing file in the folder, private to its owner."""
        path = self.folder / name
        os.close(private_opener(str(path), os.O_RDWR | os.O_CREAT))
        tighten(path)
        return path

    def _find_folder(self) -> None:
        """Reopen the folder if it was created again. Raises FolderGone.

        Does not create it: a mount may only be away, and the disk below is not the place for files.
        """
        with contextlib.suppress(FileNotFoundError):
            if _identity(self.folder / "lock") == self._opened:
                return
        if not self.folder.is_dir():
            raise FolderGone("files and batches: their folder is gone; the server's owner can "
                             "create it again (--batch-dir)")  # fmt: skip
        logger.warning("batch_dir: %s was replaced and is opened again", self.folder)
        self.close()
        try:
            self.open()
        except ConfigError as error:
            raise StorageFailed(error.message) from None

    def close(self) -> None:
        self._opened = None
        self._db.close()
        self._lock.close()

    async def start(self) -> None:
        try:
            await self.call(self.open)
        except ConfigError:
            self._thread.shutdown(wait=False)
            raise

    async def shut(self) -> None:
        """Close, and end the thread."""
        await self.call(self.close)
        self._thread.shutdown(wait=False)

    def _tidy(self) -> None:
        """Remove partial uploads and files without a row, and undo unfinished finalizations."""
        for path in (self.folder / "incoming").iterdir():
            path.unlink()
        for batch in self.unfinished():
            for part in ("output", "errors"):
                unfinished = self.content(self.result_id(batch, part))
                if unfinished.exists():
                    unfinished.replace(self.results(batch, part))
                    self._db.execute(
                        "DELETE FROM files WHERE id = ?", (self.result_id(batch, part),)
                    )
        file_ids = {name for (name,) in self._db.execute("SELECT id FROM files")}
        for path in (self.folder / "files").iterdir():
            if path.name not in file_ids:
                path.unlink()
        self.drop_expired()

    # ------------------------------------------------------------ files

    def incoming(self, file_id: str) -> Path:
        return self.folder / "incoming" / file_id

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content; only for this server's ids."""
        return self.folder / "files" / file_id

    def check_room(self, size: int) -> None:
        self.drop_expired()
        (num_bytes,) = self._db.execute("SELECT COALESCE(SUM(bytes), 0) FROM files").fetchone()
        if num_bytes + size > self.max_bytes:
            raise InvalidRequest(
                f"file: the server keeps {self.max_bytes} bytes at most; delete other files first",
                param="file",
            )

    def add_file(self, file: FileObject, source: Path, owner: str = "") -> None:
        if file.purpose == "batch":
            self.check_room(file.bytes)
        data = msgspec.json.encode(file)
        source.replace(self.content(file.id))
        try:
            self._db.execute(
                "INSERT OR REPLACE INTO files (id, purpose, bytes, expires_at, data, owner) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (file.id, file.purpose, file.bytes, file.expires_at, data, owner),
            )
        except sqlite3.Error:
            if file.purpose == "batch":  # Results are kept, so that `finish` can be called again.
                self.content(file.id).unlink(missing_ok=True)
            raise

    def file(self, file_id: str, owner: str | None = None) -> FileObject:
        self.drop_expired()
        row = self._row("files", file_id, owner)
        if row is None:
            raise NotFound(f"there is no file {shown(file_id)}", param="file_id")
        return msgspec.json.decode(row[0], type=FileObject)

    def files(
        self,
        after: str | None,
        limit: int,
        ascending: bool,
        purpose: str | None,
        owner: str | None = None,
    ) -> list[FileObject]:
        """Return a page of files, plus one if there are more. Raises NotFound."""
        self.drop_expired()
        rows = self._page("files", after, limit, ascending, purpose, owner)
        return [msgspec.json.decode(data, type=FileObject) for data in rows]

    def delete_file(self, file_id: str, owner: str | None = None) -> None:
        """Raises NotFound, and Conflict while a batch reads it."""
        self.file(file_id, owner)
        for batch in self.unfinished():
            if batch.input_file_id == file_id:
                raise Conflict(
                    f"{batch.id} still reads {file_id}; cancel it first", param="file_id"
                )
        forget = "DELETE FROM files WHERE id = ?"
        try:
            self._db.execute(forget, (file_id,))
        except sqlite3.Error:
            # A full disk has no room for the deletion's row either, until the content is removed.
            self.content(file_id).unlink(missing_ok=True)
            self._db.execute(forget, (file_id,))
        self.content(file_id).unlink(missing_ok=True)

    def drop_expired(self) -> None:
        """Delete expired files that no unfinished batch reads."""
        rows = self._db.execute(
            "SELECT id FROM files WHERE expires_at <= ?", (int(time.time()),)
        ).fetchall()
        if not rows:
            return
        in_use = {batch.input_file_id for batch in self.unfinished()}
        for (file_id,) in rows:
            if file_id not in in_use:
                self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))
                self.content(file_id).unlink(missing_ok=True)

    # ------------------------------------------------------------ batches

    def put(self, batch: Batch, tenant: Tenant = ANYONE) -> None:
        """Store a new batch for its tenant, or a new state."""
        data, final = msgspec.json.encode(batch), batch.status in FINAL
        self._db.execute(
            "INSERT INTO batches (id, final, data, owner, tenant) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET final = excluded.final, data = excluded.data",
            (batch.id, final, data, tenant.owner, msgspec.json.encode(tenant)),
        )

    def tenant(self, batch_id: str) -> Tenant:
        """Return a batch's tenant, or ANYONE."""
        (tenant,) = self._db.execute(
            "SELECT tenant FROM batches WHERE id = ?", (batch_id,)
        ).fetchone()
        return ANYONE if tenant is None else msgspec.json.decode(tenant, type=Tenant)

    def has_results(self, batch: Batch, part: Part) -> bool:
        """Return whether a batch's results exist, as a file or not yet."""
        final = self.content(self.result_id(batch, part))
        return self.results(batch, part).exists() or final.exists()

    def batch(self, batch_id: str, owner: str | None = None) -> Batch:
        row = self._row("batches", batch_id, owner)
        if row is None:
            raise NotFound(f"there is no batch {shown(batch_id)}", param="batch_id")
        return msgspec.json.decode(row[0], type=Batch)

    def batches(self, after: str | None, limit: int, owner: str | None = None) -> list[Batch]:
        """Return a page of batches, newest first, plus one if there are more. Raises NotFound."""
        rows = self._page("batches", after, limit, False, None, owner)
        return [msgspec.json.decode(data, type=Batch) for data in rows]

    def unfinished(self) -> list[Batch]:
        rows = self._db.execute("SELECT data FROM batches WHERE NOT final ORDER BY seq")
        return [msgspec.json.decode(data, type=Batch) for (data,) in rows.fetchall()]

    def results(self, batch: Batch, part: Part) -> Path:
        """Return the path of a batch's results before they become a file."""
        return self.folder / "results" / f"{batch.id}.{part}"

    def result_id(self, batch: Batch, part: Part) -> str:
        """Return the id of the results' file, stable over restarts."""
        digest = hashlib.blake2b(f"{batch.id}.{part}".encode(), digest_size=16)
        return f"file-{digest.hexdigest()}"

    def finish(self, batch: Batch, tenant: Tenant = ANYONE) -> None:
        """Turn the results into the tenant's files, and store the final status. May be repeated
        after a failure.
        """
        for part in ("output", "errors"):
            path = self.results(batch, part)
            if not path.exists():  # An earlier call moved it already.
                path = self.content(self.result_id(batch, part))
            size = path.stat().st_size if path.exists() else 0
            if not size:
                path.unlink(missing_ok=True)
                continue
            now, after = int(time.time()), batch.output_expires_after
            file = FileObject(
                id=self.result_id(batch, part),
                bytes=size,
                created_at=now,
                filename=f"{batch.id}_{'output' if part == 'output' else 'error'}.jsonl",
                purpose="batch_output",
                expires_at=None if after is None else now + after.seconds,
            )
            self.add_file(file, path, tenant.owner)
            if part == "output":
                batch.output_file_id = file.id
            else:
                batch.error_file_id = file.id
        self.put(batch, tenant)

    def _row(self, table: str, id: str, owner: str | None) -> tuple[Any, ...] | None:
        """Return (data, seq) of this owner's row, or None."""
        query = f"SELECT data, seq FROM {table} WHERE id = ? AND (? IS NULL OR owner = ?)"
        row: tuple[Any, ...] | None = self._db.execute(query, (id, owner, owner)).fetchone()
        return row

    def _page(
        self,
        table: str,
        after: str | None,
        limit: int,
        ascending: bool,
        purpose: str | None,
        owner: str | None,
    ) -> list[bytes]:
        order, sign = ("ASC", ">") if ascending else ("DESC", "<")
        conditions: list[str] = ["1"]
        values: list[Any] = []
        if after is not None:
            row = self._row(table, after, owner)
            if row is None:
                raise NotFound(f"after: there is no {shown(after)}", param="after")
            conditions.append(f"seq {sign} ?")
            values.append(row[1])
        if purpose is not None:
            conditions.append("purpose = ?")
            values.append(purpose)
        if owner is not None:
            conditions.append("owner = ?")
            values.append(owner)
        rows = self._db.execute(
            f"SELECT data FROM {table} WHERE {' AND '.join(conditions)} ORDER BY seq {order} "
            "LIMIT ?",
            (*values, limit + 1),
        )
        return [data for (data,) in rows.fetchall()]


def _identity(file: Path | int) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())

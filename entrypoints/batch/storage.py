"""Converts errors of a full or failing disk, from the file system and SQLite."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Iterator

from ...core.errors import JackfieldError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StorageFailed(JackfieldError):
    """The folder of files and batches cannot be read or written."""

    code = "storage_failed"


class StorageFull(StorageFailed):
    """The disk has no room: delete files, or try again later."""

    status = 507
    code = "insufficient_storage"


class FolderGone(StorageFailed):
    """The folder was removed while the server ran."""

    status = 503


@contextlib.contextmanager
def storage(what: str) -> Iterator[None]:
    """Convert errors of disk operations to StorageFull or StorageFailed. `what`: the operation."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(f"{what}: the server's disk is full") from error
        raise StorageFailed(f"{what}: the server's disk fails ({error.strerror})") from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise StorageFull(f"{what}: the server's disk is full") from error
        raise StorageFailed(f"{what}: the server's disk fails ({error})") from error

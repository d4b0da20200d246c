"""A batch's file of results: appended to, repaired after a kill, finally sorted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path

from ...core.errors import InvalidRequest
from ...core.recording.private_files import FILE_MODE
from .jsonl import Result, id_of


class ResultsFile:
    """A file to which results are appended. Blocks: not for the event loop.

    Opening it removes a half-written last line and reads its results. After `append`, the operating
    system has the line, so a killed process loses none.
    """

    def __init__(self, path: Path, *, anew: bool = False, mode: int = FILE_MODE) -> None:
        """`anew`: discard content. `mode`: of a new file, before the umask.

        Raises InvalidRequest if the file contains anything but results, or another run has it open.
        """
        self.path = path
        self.done: dict[str, int] = {}
        """Id of each result → input line number."""
        self._places: list[tuple[int, int, int]] = []
        """Input line number, offset and length of each result."""
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, mode), "r+b")
        try:
            self._lock_out()
            self._size = 0 if anew else self._read()
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(self._size)

    def _lock_out(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequest(f"{self.path}: another run writes to it") from None

    def _read(self) -> int:
        """Read the results; return the end of the last complete line."""
        end = 0
        for number, raw in enumerate(self._file, 1):
            whole = raw.endswith(b"\n")
            if (ids := id_of(raw)) is None:
                if whole or not b'{"id":"batch_req_'.startswith(raw[:17]):
                    raise InvalidRequest(
                        f"{self.path}: line {number} is not a result of a batch; use another file, "
                        "or --overwrite"
                    )
                break
            if not whole:
                break
            custom_id, place = ids
            self.done[custom_id] = place
            self._places.append((place, end, len(raw)))
            end += len(raw)
        return end

    def append(self, result: Result) -> None:
        """Append a line. Raises OSError without room, leaving no part of it."""
        with self._lock:
            try:
                self._write(result.encoded)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), self._size)
                raise
            self.done[result.line.id] = result.line.number
            self._places.append((result.line.number, self._size, len(result.encoded)))
            self._size += len(result.encoded)

    def _write(self, data: bytes) -> None:
        """Unbuffered: a buffer would write the rest later."""
        offset = 0
        while offset < len(data):
            offset += os.pwrite(self._file.fileno(), data[offset:], self._size + offset)

    def put_in_order(self) -> None:
        """Sort the lines in the input's order, replacing the file atomically."""
        if self._places == sorted(self._places):
            return
        other = self.path.with_name(self.path.name + ".sorting")
        with other.open("wb") as file:
            for _, offset, length in sorted(self._places):
                file.write(os.pread(self._file.fileno(), length, offset))
            file.flush()
            os.fchmod(file.fileno(), os.fstat(self._file.fileno()).st_mode & 0o7777)
            os.fsync(file.fileno())
        other.replace(self.path)

    def close(self) -> None:
        """Close the file after writing it to disk."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    @property
    def size(self) -> int:
        return self._size

"""A recording's file: a header, then plans, results and jobs in order.

MessagePack: a stream of `bin 32`, each one encoded object.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias, TypeVar

import msgspec

from ..config import EngineConfig
from ..errors import ConfigError
from ..parts.part_types import PartTypes
from ..protocols.executors import ExecutorInfo
from ..step import StepPlan, StepResult, WorkerJob

FORMAT = "jackfield steps 3"
"""Increased when the meaning changes."""
HEAD = struct.Struct(">BI")
"""MessagePack's `bin 32`: mark and length."""
BIN_32 = 0xC6
MAX_OBJECT = 1 << 30
"""Most bytes of an object."""


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    format: str
    versions: dict[str, str]
    """Versions of Jackfield, Python and computing libraries."""
    config: EngineConfig
    """Resolved; its seed yields plans' seeds."""
    info: ExecutorInfo
    fingerprint: bytes | None
    """The model's (`ModelFingerprint`), if known."""


class PlanEntry(msgspec.Struct, frozen=True, tag="plan"):
    plan: StepPlan


class ResultEntry(msgspec.Struct, frozen=True, tag="result"):
    """Result of the oldest plan without one."""

    result: StepResult


class FailureEntry(msgspec.Struct, frozen=True, tag="failure"):
    """Failure of the oldest plan without a result."""

    step: int
    error: str


class JobEntry(msgspec.Struct, frozen=True, tag="job"):
    job: WorkerJob


Entry: TypeAlias = PlanEntry | ResultEntry | FailureEntry | JobEntry
T = TypeVar("T")
_HEADERS = msgspec.msgpack.Decoder(Header)
_ENTRIES: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


class Writer:
    def __init__(self, path: str) -> None:
        """Create the private file. Raises ConfigError if it exists, or cannot be created."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(
                f"record_steps: there is a file {path!r} already", param="record_steps"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"record_steps: {path!r} cannot be created: {error.strerror}", param="record_steps"
            ) from error
        self.path = path
        self.num_bytes = 0
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, item: Header | Entry) -> None:
        """Append one object, or nothing. Raises OSError, and msgspec's errors. Written data
        survives a kill of this process.
        """
        data = self._encoder.encode(item)
        self._file.write(HEAD.pack(BIN_32, len(data)) + data)
        self._file.flush()
        self.num_bytes += HEAD.size + len(data)

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
        """Remove the file of an engine that did not start."""
        self._file.close()
        os.unlink(self.path)


class Recording:
    def __init__(self, path: str) -> None:
        """Read the header. Raises ConfigError for another file."""
        self.path = path
        self.cut_off = False
        """Whether the file ends within an object; set at the end."""
        try:
            self._data = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        self._objects = self._split()
        data = next(self._objects, b"")
        try:
            header = msgspec.msgpack.decode(data)
            file_format = header.get("format") if isinstance(header, dict) else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            file_format = None
        if not isinstance(file_format, str) or not file_format.startswith(
            FORMAT.rpartition(" ")[0]
        ):
            raise ConfigError(f"{path}: it is not a recording of steps")
        if file_format != FORMAT:
            raise ConfigError(
                f"{path}: its format is {file_format!r}, and this Jackfield reads {FORMAT!r}"
            )
        self.header: Header = self._decode(data, 0, _HEADERS)

    def entries(self, types: PartTypes | None = None) -> Iterator[Entry]:
        """types: of parts' data. Raises ConfigError for a damaged entry."""
        types = types or PartTypes()
        for number, data in enumerate(self._objects, 1):
            entry = self._decode(data, number, _ENTRIES)
            if isinstance(entry, PlanEntry):
                entry = PlanEntry(types.plan(entry.plan))
            elif isinstance(entry, ResultEntry):
                entry = ResultEntry(types.result(entry.result))
            yield entry

    def _decode(self, data: bytes, number: int, decoder: msgspec.msgpack.Decoder[T]) -> T:
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, ConfigError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}: object {number} is damaged: {error}") from error

    def _split(self) -> Iterator[bytes]:
        place, data = 0, self._data
        while place < len(data):
            if len(data) - place < HEAD.size:
                self.cut_off = True
                return
            mark, size = HEAD.unpack_from(data, place)
            if mark != BIN_32 or size > MAX_OBJECT:
                raise ConfigError(f"{self.path}: byte {place} begins no object of a recording")
            place += HEAD.size
            if len(data) - place < size:
                self.cut_off = True
                return
            yield data[place : place + size]
            place += size

"""Each rank's progress, in memory shared by an engine's ranks."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, BinaryIO, NamedTuple

from ...core.parallel.ranks import Group

CELL = 8
"""Bytes of a number; written atomically."""
COLUMNS = ("beats", "started", "finished", "collectives", "compiling", "awaits_engines")
"""Signs of life; number of the last step or job that the rank started, and finished; calls to other
ranks; signs of life while compiling; 1 while it waits for other engines to begin a step."""
BEAT_SECONDS = 0.25
TOKENS = 8192
"""Tokens of a prompt step per no-progress timeout: the host does not see the device's progress
within a step. At 8 seconds, that is 1 ms per token; a 70B model on two 700 TFLOP/s cards takes
0.1."""
COMPILERS = (
    "/triton/compiler/", "/triton/backends/", "/triton/runtime/build", "/kernels/compile.py",
    "/flashinfer/jit/", "/torch/utils/cpp_extension", "/torch/_inductor/", "/cutlass/",
)  # fmt: skip
"""File name parts on the stack of a thread that compiles, or waits for a compiler."""


class Progress:
    """One rank's counters: it alone writes, other processes read.

    The memory has no name in the file system, so it is freed with its last user.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._memory = mmap.mmap(file.fileno(), len(COLUMNS) * CELL)
        self._cells = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls) -> Progress:
        file: BinaryIO
        if hasattr(os, "memfd_create"):
            file = os.fdopen(os.memfd_create("jackfield-progress"), "r+b")
        else:
            file = tempfile.TemporaryFile()
        file.truncate(len(COLUMNS) * CELL)
        return cls(file)

    def close(self) -> None:
        self._cells.release()
        self._memory.close()
        self.file.close()

    def counts(self) -> tuple[int, ...]:
        """Return the counters, in the order of COLUMNS."""
        return tuple(self._cells)

    def copy(self, counts: Sequence[int]) -> None:
        """Copy the counters of a remote rank."""
        for column, count in enumerate(counts):
            self._cells[column] = count

    def read(self) -> dict[str, int]:
        """Return the counters by name."""
        return dict(zip(COLUMNS, self._cells, strict=True))

    def beat(self, thread: int) -> None:
        """Record a sign of life. `thread`: identifier of the launching thread."""
        self._cells[0] += 1
        if is_compiling(sys._current_frames().get(thread)):
            self._cells[4] += 1

    def start(self, number: int) -> None:
        self._cells[1] = number

    def finish(self, number: int) -> None:
        """Record the end of a step or job, failed or not."""
        self._cells[2] = number

    def await_engines(self, waits: bool) -> None:
        """Note that the rank begins, or ends, to wait for other engines."""
        self._cells[5] = waits

    def counted_call(self) -> None:
        self._cells[3] += 1

    def counted(self, group: Group) -> CountedGroup:
        """Return the group, counting its calls."""
        return CountedGroup(group, self.counted_call)


class CountedGroup:
    """Counts calls of a group; a recorded graph counts only when recorded."""

    def __init__(self, group: Any, count: Callable[[], None]) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._count = count

    def all_reduce(self, x: Any, residual: Any = None) -> Any:
        """As the group's."""
        self._count()
        return self._group.all_reduce(x, residual)

    def all_gather(self, x: Any) -> Any:
        """As the group's."""
        self._count()
        return self._group.all_gather(x)

    def send(self, x: Any, to: int) -> None:
        """As the group's."""
        self._count()
        self._group.send(x, to)

    def receive(self, into: Any, source: int) -> Any:
        """As the group's."""
        self._count()
        return self._group.receive(into, source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def is_compiling(frame: FrameType | None) -> bool:
    """Return whether a thread compiles, by its innermost frame."""
    while frame is not None:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        if any(part in name for part in COMPILERS):
            return True
        frame = frame.f_back
    return False


class Stall(NamedTuple):
    reason: str
    """Rest of a sentence that begins with the duration."""
    ticks: int
    """The duration."""


class StallDetector:
    """Finds frozen ranks, and steps without progress.

    Counts ticks of the watching process, so no time passes while all processes are suspended.
    """

    def __init__(self, ranks: Sequence[Progress], ticks: int) -> None:
        """ranks: all, from 0. ticks: limit without a sign of life, or without progress, doubled for
        a step of TOKENS tokens, and so on.
        """
        self._ranks = ranks
        self._ticks = ticks
        self._beats = [0] * len(ranks)
        self._silent = [0] * len(ranks)
        """Ticks since each rank's last sign of life."""
        self._last: list[dict[str, int]] = []
        self._still = 0
        """Ticks since any rank's last progress."""

    def tick(self, awaited: bool, tokens: int = 0) -> Stall | None:
        """Return what is wrong; None if nothing. `awaited`: whether progress is due; `tokens`: of
        the longest step awaited.
        """
        rows = [rank.read() for rank in self._ranks]
        for rank, row in enumerate(rows[1:], 1):
            silent = row["beats"] == self._beats[rank] and row["beats"] > 0
            self._silent[rank] = self._silent[rank] + 1 if silent else 0
            self._beats[rank] = row["beats"]
            if self._silent[rank] >= self._ticks:
                return Stall(f"rank {rank} has given no sign of life", self._ticks)
        progress = [{name: row[name] for name in COLUMNS[1:]} for row in rows]
        elsewhere = all(row["awaits_engines"] for row in rows)
        stays = awaited and progress == self._last and not elsewhere
        self._still = self._still + 1 if stays else 0
        self._last = progress
        most = round(self._ticks * (1 + tokens / TOKENS))
        return Stall(self._blame(rows), most) if self._still >= most else None

    def _blame(self, rows: list[dict[str, int]]) -> str:
        reached = [(row["finished"], row["started"], row["collectives"]) for row in rows]
        behind = [str(rank) for rank, place in enumerate(reached) if place == min(reached)]
        if len(behind) == len(rows):
            return f"no rank has made progress in step or job {rows[0]['started']}"
        ranks = f"rank {behind[0]} has" if len(behind) == 1 else f"ranks {', '.join(behind)} have"
        return (
            f"{ranks} made no progress in step or job {max(1, min(reached)[1])}, and the others "
            "wait"
        )

"""How far each rank has come, in memory that all ranks of an engine share."""

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
"""Bytes of a number, which is written whole."""
COLUMNS = ("beats", "started", "finished", "collectives", "compiling")
"""Of a rank: signs of life; the number of the last step or job that it started, and that it
finished; calls to other ranks; signs of life while it compiled."""
BEAT_SECONDS = 0.25
TOKENS = 8192
"""A step with prompts is launched at once, and the host does not see how the device gets on. With 8
seconds for so many tokens it has 1 ms for each; at the rate of two cards of 700 TFLOP/s, one of 70
billion parameters takes 0.1. On a CPU the host sees each layer's calls to other ranks."""
COMPILERS = (
    "/triton/compiler/", "/triton/backends/", "/triton/runtime/build", "/kernels/compile.py",
    "/flashinfer/jit/", "/torch/utils/cpp_extension", "/torch/_inductor/", "/cutlass/",
)  # fmt: skip
"""Parts of the names of files that are on the stack of a thread that compiles, or that waits for a
compiler."""


class Progress:
    """The numbers of one rank, which it alone writes, and other processes read.

    The memory has no name in the file system: it is freed with the last process that has it open.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._memory = mmap.mmap(file.fileno(), len(COLUMNS) * CELL)
        self._cells = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls) -> Progress:
        """Return a row of zeros in new memory."""
        file: BinaryIO
        if hasattr(os, "memfd_create"):
            file = os.fdopen(os.memfd_create("jackfield-progress"), "r+b")
        else:
            file = tempfile.TemporaryFile()
        file.truncate(len(COLUMNS) * CELL)
        return cls(file)

    def close(self) -> None:
        """Free the memory, which nothing uses here any more."""
        self._cells.release()
        self._memory.close()
        self.file.close()

    def counts(self) -> tuple[int, ...]:
        """Return what the rank has written, in the order of COLUMNS."""
        return tuple(self._cells)

    def copy(self, counts: Sequence[int]) -> None:
        """Take over the `counts` of a rank of another host."""
        for column, count in enumerate(counts):
            self._cells[column] = count

    def read(self) -> dict[str, int]:
        """Return what the rank has written, by the names of COLUMNS."""
        return dict(zip(COLUMNS, self._cells, strict=True))

    def beat(self, thread: int) -> None:
        """Give a sign of life. `thread`: identifier of the one that launches steps."""
        self._cells[0] += 1
        if is_compiling(sys._current_frames().get(thread)):
            self._cells[4] += 1

    def start(self, number: int) -> None:
        """Note the step or job that begins."""
        self._cells[1] = number

    def finish(self, number: int) -> None:
        """Note the step or job that has ended, well or not."""
        self._cells[2] = number

    def counted_call(self) -> None:
        """Note a call to other ranks."""
        self._cells[3] += 1

    def counted(self, group: Group) -> CountedGroup:
        """Return the group, with its calls counted."""
        return CountedGroup(group, self.counted_call)


class CountedGroup:
    """A group that counts calls. Of a recorded graph, only the recording is one."""

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
    """What is wrong."""

    reason: str
    """The end of a sentence that begins with a duration."""
    ticks: int
    """That duration."""


class StallDetector:
    """Finds ranks that are frozen, and steps in which no rank makes progress.

    Time is counted in ticks of the process that watches, so that it does not pass while all
    processes are suspended together.
    """

    def __init__(self, ranks: Sequence[Progress], ticks: int) -> None:
        """ranks: all, from 0. ticks: without a sign of life, or without progress, after which a
        rank counts as stalled; without progress in a step of TOKENS twice as many, and so on."""
        self._ranks = ranks
        self._ticks = ticks
        self._beats = [0] * len(ranks)
        self._silent = [0] * len(ranks)
        """Ticks since each rank's last sign of life."""
        self._last: list[dict[str, int]] = []
        self._still = 0
        """Ticks since any rank's last progress."""

    def tick(self, awaited: bool, tokens: int = 0) -> Stall | None:
        """Return what is wrong; None: nothing. `awaited`: whether a step or job is awaited, so that
        there should be progress; `tokens`: of the longest of these steps."""
        rows = [rank.read() for rank in self._ranks]
        for rank, row in enumerate(rows[1:], 1):
            silent = row["beats"] == self._beats[rank] and row["beats"] > 0
            self._silent[rank] = self._silent[rank] + 1 if silent else 0
            self._beats[rank] = row["beats"]
            if self._silent[rank] >= self._ticks:
                return Stall(f"rank {rank} has given no sign of life", self._ticks)
        progress = [{name: row[name] for name in COLUMNS[1:]} for row in rows]
        self._still = self._still + 1 if awaited and progress == self._last else 0
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

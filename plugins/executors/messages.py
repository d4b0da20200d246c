"""Messages between rank 0 and the other ranks of an engine: msgspec Structs in frames.

Frames are those of `core.remote.frames`. Nothing is ever unpickled.
"""

from __future__ import annotations

import collections
import socket
from typing import Generic, TypeAlias, TypeVar

import msgspec

from ...core.config import EngineConfig
from ...core.errors import JackfieldError, error_named
from ...core.parts.kv_transfer import KVDetached, KVReport
from ...core.parts.part_types import PartTypes
from ...core.protocols.executors import ExecutorInfo
from ...core.remote.frames import FrameReader, encode
from ...core.step import StepPlan, WorkerJob

PART = 1 << 16
"""Bytes per read."""
ROWS = ("slots", "num_tokens", "samples")
"""Plan fields that steps without new requests may repeat."""
T = TypeVar("T")


# ---------------------------------------------------------------- rank 0 → the others


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """First frame: how to start a rank."""

    config: EngineConfig
    rank: int
    local_rank: int
    """The device's number on its host."""
    address: tuple[str, int]
    """Host and port where rank 0 listens (`core.parallel.join`)."""
    plugins: tuple[str, ...]
    """Entry points of the external plugins to load."""
    log_level: int
    """Level of the log records to send to rank 0."""


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Run a plan; only a failure is reported."""

    number: int
    """Number of this step or job, from 1."""
    plan: StepPlan
    repeats_rows: bool = False
    """Whether the plan is sent without ROWS, which are those of the last plan."""


class Job(msgspec.Struct, frozen=True, tag="job"):
    """Do a job in order; replied to by Done or Failed."""

    number: int
    job: WorkerJob


class Detach(msgspec.Struct, frozen=True, tag="detach"):
    """A rank's worker half of the KV connector has raised: close all halves."""

    failure: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """Finish queued work, free the device, and exit."""


ToFollower: TypeAlias = Setup | Step | Job | Detach | End


# ---------------------------------------------------------------- the others → rank 0


class Joining(msgspec.Struct, frozen=True, tag="joining"):
    """The rank is about to join, so rank 0 may join, too, which waits without a timeout."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: ExecutorInfo


class Done(msgspec.Struct, frozen=True, tag="done"):
    number: int


class Transferred(msgspec.Struct, frozen=True, tag="transferred"):
    """Report of a KV connector's worker half with a step."""

    report: KVReport | None
    """Without a payload."""
    detached: KVDetached | None


class HasReport(msgspec.Struct, frozen=True, tag="has_report"):
    """A KV connector's worker half has something to report."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The start (number 0), a step or a job raised."""

    number: int
    kind: str
    """Name of the exception's class, or of its nearest base in Jackfield."""
    message: str
    param: str | None = None

    @classmethod
    def from_error(cls, number: int, error: BaseException) -> Failed:
        names = (base.__name__ for base in type(error).__mro__ if error_named(base.__name__))
        kind = next(names, type(error).__name__)
        message = error.message if isinstance(error, JackfieldError) else str(error)
        text = message.encode("utf-8", "replace").decode()
        return cls(number, kind, text, getattr(error, "param", None))

    def error(self, rank: str) -> Exception:
        """Return the exception, naming the rank."""
        if (kind := error_named(self.kind)) is not None:
            return kind(f"{rank}: {self.message}", param=self.param)
        return RuntimeError(f"{rank}: {self.kind}: {self.message}")


class Log(msgspec.Struct, frozen=True, tag="log"):
    """A log record, for the handlers of rank 0's process."""

    level: int
    name: str
    text: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Progress of a rank that shares no memory with rank 0."""

    counts: tuple[int, ...]
    """[len(progress.COLUMNS)]"""


class RanksOfHost(msgspec.Struct, frozen=True, tag="ranks_of_host"):
    """First frame of another host: the ranks that it starts."""

    ranks: tuple[int, ...]


class RankEnded(msgspec.Struct, frozen=True, tag="rank_ended"):
    """A rank's process has ended on its host."""

    rank: int
    ending: str
    """Rest of a sentence on its end."""


class DumpStacks(msgspec.Struct, frozen=True, tag="dump_stacks"):
    """To another host: let its ranks write their stacks."""


ToLeader: TypeAlias = Joining | Ready | Done | Transferred | HasReport | Failed | Log | Beat


class PlanRows:
    """Rows of the last plan sent or received, for `Step.repeats_rows`."""

    def __init__(self, types: PartTypes | None = None) -> None:
        """types: of the parts in plans."""
        self._types = types or PartTypes()
        self._last: tuple[object, ...] = ((),) * len(ROWS)

    def encode_step(self, number: int, plan: StepPlan) -> bytes:
        """Encode a step that is about to be sent. Raises what `frames.encode` raises."""
        slots, num_tokens, samples = self._last
        # The scheduler repeats the objects themselves.
        repeats = plan.slots is slots and plan.num_tokens is num_tokens and plan.samples is samples
        if repeats:
            sent = msgspec.structs.replace(plan, slots=(), num_tokens=(), samples=())
            return encode(Step(number, sent, True))
        frame = encode(Step(number, plan))
        self._last = plan.slots, plan.num_tokens, plan.samples
        return frame

    def plan_of(self, step: Step) -> StepPlan:
        """Return a received step's plan, with its rows."""
        plan = self._types.plan(step.plan)
        if step.repeats_rows:
            return msgspec.structs.replace(plan, **dict(zip(ROWS, self._last, strict=True)))
        self._last = plan.slots, plan.num_tokens, plan.samples
        return plan


class Inbox(Generic[T]):
    """Receives messages of one type from a blocking socket."""

    def __init__(self, connection: socket.socket, kind: object) -> None:
        self._connection = connection
        self._reader: FrameReader[T] = FrameReader(kind)
        self._messages: collections.deque[T] = collections.deque()

    def take(self) -> T | None:
        """Block until a message arrives; None: the connection is closed."""
        while not self._messages:
            data = self._connection.recv(PART)
            if not data:
                return None
            self._messages.extend(self._reader.read_frames(data))
        return self._messages.popleft()

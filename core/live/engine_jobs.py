"""What an engine is asked while it lives: to pause, to take other weights. Plain data.

Each job says what it answers: fields of a JSON object.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from ..errors import InvalidRequest, shown
from .worker_jobs import SharedBucket, TensorPart

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
LEASE_SECONDS = 600.0
"""How long a pause or an update lasts without a call about it, unless its caller says."""
TAGS = ("weights", "kv_cache")
"""What an engine can sleep without."""
FIRST_VERSION = "default"
"""Version of the weights that an engine starts with."""
MAX_VERSION_LENGTH = 256


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Launch no further step. → as `AskLive`, once the device is idle

    A pause while one lasts takes its place: requests that it kept are aborted, or run to their
    end.
    """

    mode: PauseMode = "abort"
    """abort: requests end with what they have. wait: they run to their end first. keep: they go on
    at the end of the pause. New requests are refused, with when to come again; with keep they
    wait."""
    clear_cache: bool = True
    """Forget cached prefixes; requests that are kept are computed again. False: they go on with
    their caches."""
    lease: float | None = LEASE_SECONDS
    """Seconds after which the pause ends unless a call renews it; None: never."""


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """End the pause, if there is one. → as `AskLive`"""


class AskLive(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """→ is_paused, mode (None: not paused), lease (seconds left, or None), weights_version,
    updating (whether an update is in progress), num_requests (running or waiting), world_size
    (ranks), is_sleeping, asleep (the tags)"""


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag="reset_prefix_cache"):
    """Forget cached prefixes. → success

    Running requests are computed again if asked; otherwise nothing is forgotten while there are
    any.
    """

    reset_running_requests: bool = False


class BeginUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="begin_update"):
    """Begin to take new weights, beside those that serve. → update, a name for it

    Raises Conflict while another one is in progress, and OutOfMemory.
    """

    lease: float | None = LEASE_SECONDS
    """Seconds without a call about it after which it is given up; None: never."""


class ReadFiles(msgspec.Struct, frozen=True, kw_only=True, tag="read_files"):
    """Read all weights from a checkpoint's folder on the engine's machine. → {}"""

    update: str = ""
    """Of all jobs, "": the one that is in progress."""
    path: str
    load_format: str = ""
    """Name of the loader; "": the engine's own."""


class PutTensors(msgspec.Struct, frozen=True, kw_only=True, tag="put_tensors"):
    """Take tensors, as a checkpoint has them. → {}"""

    update: str = ""
    parts: tuple[TensorPart, ...]
    data: bytes
    """The bytes of all parts, one after the other."""


class JoinGroup(msgspec.Struct, frozen=True, kw_only=True, tag="join_group"):
    """Join a `torch.distributed` group that weights come from. → world_size, of the engine"""

    group: str = "weights"
    host: str
    port: int
    rank_offset: int = 1
    world_size: int
    backend: str = ""
    timeout: float = 300.0
    packed_bytes: int = 0
    rendezvous: str = "torch"
    unique_id: bytes = b""
    """These: see `JoinSenders`."""


class LeaveGroup(msgspec.Struct, frozen=True, kw_only=True, tag="leave_group"):
    """Leave a group. → {}"""

    group: str = "weights"


class ReceiveTensors(msgspec.Struct, frozen=True, kw_only=True, tag="receive_tensors"):
    """Receive whole tensors, in this order, from number 0 of a group. → {}"""

    update: str = ""
    parts: tuple[TensorPart, ...]
    """(): those of the last time."""
    group: str = "weights"


class OpenTensors(msgspec.Struct, frozen=True, kw_only=True, tag="open_tensors"):
    """Take tensors that are in device memory of another process of the same host. → {}

    Once it is done, the memory may be written again.
    """

    update: str = ""
    buckets: tuple[SharedBucket, ...]


class PrepareUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="prepare_update"):
    """Check that an update is whole, so that its commit cannot fail for what it is. → {}

    Raises as `CommitUpdate`, which does it otherwise.
    """

    update: str = ""


class CommitUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="commit_update"):
    """Serve with the new weights from the next step on. → weights_version, num_tensors (0: read
    from files), nbytes, num_recomputed (requests that are computed again), num_kept (requests that
    go on with caches of the old weights)

    Raises LoadError if they are not whole; then the old ones serve, and the update is given up.
    """

    update: str = ""
    version: str | None = None
    """Name of the new weights; None: the number of updates."""
    recompute: bool | None = None
    """Whether requests that are on their way are computed again with the new weights; None: unless
    they are kept by a pause without `clear_cache`."""


class RollBack(msgspec.Struct, frozen=True, kw_only=True, tag="roll_back"):
    """Give an update up: the old weights serve on. → {}"""

    update: str = ""


class NameWeights(msgspec.Struct, frozen=True, kw_only=True, tag="name_weights"):
    """Give the weights that serve another name, in answers from now on. → weights_version"""

    version: str


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag="sleep"):
    """Pause, without a lease, and give memory back. → as `AskLive`, freed_bytes, memory (of rank 0:
    owner, nbytes, where)

    Raises Conflict while asleep, while an update is in progress, or while a KV connector moves
    blocks, and InvalidRequest if nothing could be freed; then the engine serves on.
    """

    level: int = 1
    """1: the weights' numbers are kept in host memory, so that a CPU's weights stay where they are.
    2: they are dropped, and read again, or sent."""
    mode: PauseMode = "abort"
    """What becomes of requests, as in `Pause`; those that are kept are computed again."""
    tags: tuple[str, ...] = TAGS


class WakeUp(msgspec.Struct, frozen=True, kw_only=True, tag="wake_up"):
    """Take memory again; once all is there, requests run. → as `Sleep`

    Weights that were dropped are read from where they came from, unless an update has brought
    others since their memory is there. Raises OutOfMemory, and Conflict for weights that were sent;
    both leave the engine asleep.
    """

    tags: tuple[str, ...] = TAGS


class CallWorkers(msgspec.Struct, frozen=True, kw_only=True, tag="call_workers"):
    """Call a method of a part on each rank, between two steps. → results: what the first rank of
    each engine returns

    Raises as `CallPart`; what the method raises becomes a PluginError.
    """

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}


class ReportMemoryUse(msgspec.Struct, frozen=True, kw_only=True, tag="memory"):
    """→ memory (of rank 0: owner, nbytes, where)"""


LiveJob: TypeAlias = (
    Pause
    | Resume
    | AskLive
    | ResetPrefixCache
    | BeginUpdate
    | ReadFiles
    | PutTensors
    | JoinGroup
    | LeaveGroup
    | ReceiveTensors
    | OpenTensors
    | PrepareUpdate
    | CommitUpdate
    | RollBack
    | NameWeights
    | Sleep
    | WakeUp
    | ReportMemoryUse
    | CallWorkers
)


UPDATE_JOBS = (
    BeginUpdate, ReadFiles, PutTensors, ReceiveTensors, OpenTensors, PrepareUpdate, CommitUpdate,
    RollBack,
)  # fmt: skip


def check_mode(mode: object) -> PauseMode:
    """Return the mode of a pause. Raises InvalidRequest."""
    for each in MODES:
        if mode == each:
            return each
    raise InvalidRequest(f"mode: must be abort, wait or keep, got {shown(mode)}", param="mode")


def check_tags(tags: tuple[str, ...]) -> None:
    """Raise InvalidRequest for unknown tags, or none."""
    unknown = [tag for tag in tags if tag not in TAGS]
    if unknown or not tags:
        got = shown(unknown[0]) if unknown else "none"
        raise InvalidRequest(f"tags: must be of {' and '.join(TAGS)}, got {got}", param="tags")


def check_lease(lease: float | None) -> None:
    """Raise InvalidRequest unless a lease is None or more than 0 seconds."""
    if lease is not None and not 0 < lease < float("inf"):
        raise InvalidRequest(f"lease: must be more than 0 seconds, got {lease}", param="lease")


def check_version(version: str, field: str = "weight_version") -> None:
    """Raise InvalidRequest unless a version is a short text of printable characters."""
    if not 0 < len(version) <= MAX_VERSION_LENGTH or not version.isprintable():
        raise InvalidRequest(
            f"{field}: must be 1 to {MAX_VERSION_LENGTH} printable characters, got "
            f"{shown(version)}",
            param=field,
        )

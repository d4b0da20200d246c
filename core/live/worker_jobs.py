"""What an engine asks of each rank about weights. Plain data, without torch.

An update is staged beside the serving model: `BeginWeights`, then `ReadWeights`, `PutWeights` and
`ReceiveWeights` in any number, on a thread, while steps go on. `FinishWeights` checks that it is
whole. `ApplyWeights` alone changes the serving model, while no step is in flight; before it, an
error or `DropWeights` leaves everything as it was.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec


class TensorPart(msgspec.Struct, frozen=True):
    """A tensor of a checkpoint, or some of its bytes."""

    name: str
    dtype: str
    """As torch calls it, without "torch."."""
    shape: tuple[int, ...]
    start: int = 0
    """The first of its bytes that is sent, in the order of rows."""
    nbytes: int | None = None
    """How many are sent; None: all that are left."""


class BeginWeights(msgspec.Struct, frozen=True, tag="begin_weights"):
    """Build a second model, to be filled, in place of one that was begun. → None

    Raises OutOfMemory, ConfigError.
    """


class ReadWeights(msgspec.Struct, frozen=True, tag="read_weights"):
    """Fill the second model from a checkpoint's files. → None

    Raises LoadError.
    """

    path: str
    """Folder with the checkpoint, whose configuration is the serving model's."""
    load_format: str = ""
    """Name of the loader; "": the configured one."""


class PutWeights(msgspec.Struct, frozen=True, tag="put_weights"):
    """Fill the second model from bytes. → None

    Raises LoadError for a tensor that the model does not have, or has already.
    """

    parts: tuple[TensorPart, ...]
    data: bytes
    """The bytes of all parts, one after the other."""


class JoinSenders(msgspec.Struct, frozen=True, tag="join_senders"):
    """Join a `torch.distributed` group, of which another process sends weights. → None

    Rank r of the engine is number `rank_offset` + r in the group.
    """

    group: str
    host: str
    port: int
    rank_offset: int
    world_size: int
    backend: str
    """"nccl" or "gloo"; "": by the device."""
    timeout: float
    """Seconds to wait for the others, then and at each tensor."""
    packed_bytes: int = 0
    """More than 0: tensors come joined in buffers of bytes, each of which ends with the tensor that
    makes it longer than this."""
    rendezvous: str = "torch"
    """With NCCL, how members find each other: "torch", as groups of `torch.distributed` do; "vllm",
    as vLLM's `PyNcclCommunicator`s do."""
    unique_id: bytes = b""
    """NCCL's number of the group, where it needs no host and port."""


class LeaveSenders(msgspec.Struct, frozen=True, tag="leave_senders"):
    """Leave a group. → None"""

    group: str


class ReceiveWeights(msgspec.Struct, frozen=True, tag="receive_weights"):
    """Fill the second model from what number 0 of a group broadcasts, in this order. → None

    Raises LoadError, also if the sender has gone.
    """

    group: str
    parts: tuple[TensorPart, ...]
    """Whole tensors."""


class SharedTensor(msgspec.Struct, frozen=True):
    """A tensor in device memory of another process: what `rebuild_cuda_tensor` of torch takes."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """In the storage, in elements."""
    handle: bytes
    """CUDA's, of the allocation that the storage is in."""
    storage_bytes: int
    storage_begin: int
    """In the allocation, in bytes."""
    counter: bytes
    counter_place: int
    """By which the sender learns that it is not used any more."""
    event: bytes
    """CUDA's handle of the event after which the memory is right."""
    waits: bool
    """Whether to wait for the event."""


class SharedBucket(msgspec.Struct, frozen=True):
    """Tensors, one after the other, in device memory of another process."""

    parts: tuple[TensorPart, ...]
    """Whole tensors. One alone may have strides."""
    places: dict[str, SharedTensor]
    """By the device's UUID, or "rank" and a rank's number."""


class OpenWeights(msgspec.Struct, frozen=True, tag="open_weights"):
    """Fill the second model from memory that processes of the same host share. → None

    Once it is done the memory may be written again. Raises LoadError.
    """

    buckets: tuple[SharedBucket, ...]


class DropWeights(msgspec.Struct, frozen=True, tag="drop_weights"):
    """Forget the second model. → None"""


class FinishWeights(msgspec.Struct, frozen=True, tag="finish_weights"):
    """Check that the second model is whole, and like the serving one. → `WeightCount`

    Raises LoadError.
    """


class ApplyWeights(msgspec.Struct, frozen=True, tag="apply_weights"):
    """Copy the second model's numbers into the serving model, whose addresses stay. → None

    Asked while no step is in flight, after `FinishWeights` on all ranks.
    """


class CheckRelease(msgspec.Struct, frozen=True, tag="check_release"):
    """Check that `ReleaseMemory` would free something. → None

    Raises InvalidRequest.
    """

    owners: tuple[str, ...]
    keep: bool


class ReleaseMemory(msgspec.Struct, frozen=True, tag="release_memory"):
    """Give memory back to the system. → bytes

    Asked while no step is in flight.
    """

    owners: tuple[str, ...]
    """"weights", "kv_cache": what caches hold is lost."""
    keep: bool
    """Keep the weights' numbers in host memory."""


class RestoreMemory(msgspec.Struct, frozen=True, tag="restore_memory"):
    """Take memory again that was given back. → whether the weights need their numbers

    Raises OutOfMemory, which may be tried again.
    """

    owners: tuple[str, ...]


class CallPart(msgspec.Struct, frozen=True, tag="call_part"):
    """Call a method that the worker half of a part offers (`WorkerPart.methods`). → what it returns

    Asked while no step is in flight. Raises InvalidRequest for a name that no part offers, and what
    the method raises.
    """

    method: str
    """Name of the method; or part and method, with a dot between them."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}


class ReportMemory(msgspec.Struct, frozen=True, tag="report_memory"):
    """→ a list of `Memory`: who has how much"""


class Memory(msgspec.Struct, frozen=True):
    """Memory of one owner, on one rank."""

    owner: str
    """weights, draft_weights, kv_cache, weights_copy (in host memory); allocator: what torch holds,
    all of these and steps' own; device_used: by all programs; process: of this one on its host."""
    nbytes: int
    where: str
    """A device; "host"; or "released"."""


class WeightCount(msgspec.Struct, frozen=True):
    """How much an update has brought, on one rank."""

    num_tensors: int
    """Tensors of the checkpoint."""
    nbytes: int
    """Bytes that they have in the model."""


StagingJob: TypeAlias = (
    BeginWeights
    | ReadWeights
    | PutWeights
    | JoinSenders
    | LeaveSenders
    | ReceiveWeights
    | OpenWeights
    | DropWeights
    | FinishWeights
    | CheckRelease
    | RestoreMemory
    | CallPart
)
"""Jobs that change nothing that serves, and may fail on some ranks alone: their answer is a
future."""

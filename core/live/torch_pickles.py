"""Reads the handles of shared device memory that trainers send pickled, and nothing else.

A pickle may name any function of any module. Here it may name the few things that torch's handles
are made of, which are not looked up (`read_pickle`). Without torch.
"""

from __future__ import annotations

import binascii
import math
from base64 import b64decode
from typing import Any, TypeAlias

from ..errors import InvalidRequest
from .pickled_data import Call, Name, Unreadable, read_pickle
from .safetensors_bytes import DTYPES
from .worker_jobs import SharedBucket, SharedTensor, TensorPart

MOST_DIMENSIONS = 16
LONGEST_HANDLE = 4096
NUM_ARGUMENTS = 15
"""Arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`."""
TYPES = frozenset(("torch", name) for name in DTYPES.values())
SIZE = ("torch", "Size")
REBUILDERS = frozenset(
    {
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
        ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
    }
)
METADATA = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
"""SGLang's, of a tensor in a bucket."""
PER_RANK = ("sglang.srt.model_executor.model_runner", "LocalSerializedTensor")
"""SGLang's, of a tensor that each rank has its own pickle of."""
NAMES = frozenset(
    {
        *TYPES, SIZE, *REBUILDERS, METADATA, PER_RANK, ("torch", "Tensor"),
        ("torch._tensor", "Tensor"), ("torch.nn.parameter", "Parameter"),
        ("torch", "UntypedStorage"), ("torch.storage", "UntypedStorage"),
        ("torch", "TypedStorage"), ("torch.storage", "TypedStorage"),
    }
)  # fmt: skip


def _read(encoded: str, field: str) -> Any:
    try:
        return _content(b64decode(encoded, validate=True), field)
    except binascii.Error:
        raise _refused(field, "it is no base64") from None


def _content(data: bytes, field: str) -> Any:
    try:
        return read_pickle(data, NAMES)
    except Unreadable as error:
        raise _refused(field, f"{error}: only handles of CUDA tensors are read") from None


def _called(value: Any, name: tuple[str, str]) -> bool:
    return isinstance(value, Call) and value.name == name


# ---------------------------------------------------------------- vLLM's


def read_vllm_handles(
    encoded: str, parts: tuple[TensorPart, ...], sizes: list[int] | None
) -> tuple[SharedBucket, ...]:
    """Return what `ipc_handles_pickled` refers to: a tensor per part, or with `sizes` (bytes per
    part) all of them in one. Raises InvalidRequest."""
    field = "ipc_handles_pickled"
    content = _read(encoded, field)
    if sizes is not None:
        if len(sizes) != len(parts):
            raise InvalidRequest(
                f"tensor_sizes: {len(sizes)} sizes of {len(parts)} tensors", param="tensor_sizes"
            )
        return (SharedBucket(parts, _by_device(content, field)),)
    if not isinstance(content, list) or len(content) != len(parts):
        raise _refused(field, f"it is no list of {len(parts)} tensors' handles")
    return tuple(
        SharedBucket((part,), _by_device(each, field))
        for part, each in zip(parts, content, strict=True)
    )


def _by_device(content: Any, field: str) -> dict[str, SharedTensor]:
    if not isinstance(content, dict) or not content:
        raise _refused(field, "a tensor's handles are no mapping from devices")
    tensors = {}
    for device, arguments in content.items():
        if not isinstance(device, str):
            raise _refused(field, "a device is not named by its UUID")
        tensors[device] = _shared(arguments, field)
    return tensors


# ---------------------------------------------------------------- SGLang's


def read_sglang_tensors(encoded: list[str], *, flattened: bool) -> tuple[SharedBucket, ...]:
    """Return what `serialized_named_tensors` refers to, one text per rank. flattened: each is a
    bucket. Raises InvalidRequest."""
    field = "serialized_named_tensors"
    of_ranks = [
        _bucket_of(text, field) if flattened else _named_of(text, field, rank)
        for rank, text in enumerate(encoded)
    ]
    if not of_ranks or any(
        [b[0] for b in each] != [b[0] for b in of_ranks[0]] for each in of_ranks
    ):
        raise _refused(field, "ranks are sent different tensors, or none")
    return tuple(
        SharedBucket(of_one[0][0], {f"rank {rank}": b[1] for rank, b in enumerate(of_one)})
        for of_one in zip(*of_ranks, strict=True)
    )


_OfRank: TypeAlias = tuple[tuple[TensorPart, ...], SharedTensor]


def _named_of(text: str, field: str, rank: int) -> list[_OfRank]:
    content = _read(text, field)
    if not isinstance(content, list | tuple):
        raise _refused(field, "it is no list of names and tensors")
    tensors: list[_OfRank] = []
    for each in content:
        if not isinstance(each, list | tuple) or len(each) != 2 or not isinstance(each[0], str):
            raise _refused(field, "it is no list of names and tensors")
        name, tensor = each
        if _called(tensor, PER_RANK):
            tensor = _of_rank(tensor, name, field, rank)
        shared = _shared(tensor, field)
        tensors.append(((TensorPart(name, shared.dtype, shared.shape),), shared))
    return tensors


def _of_rank(tensor: Call, name: str, field: str, rank: int) -> Any:
    values = tensor.state.get("values") if isinstance(tensor.state, dict) else None
    if not isinstance(values, list) or rank >= len(values) or not isinstance(values[rank], bytes):
        raise _refused(field, f"tensor {name!r} is not there for rank {rank}")
    return _content(values[rank], field)


def _bucket_of(text: str, field: str) -> list[_OfRank]:
    content = _read(text, field)
    if not isinstance(content, dict) or not isinstance(content.get("metadata"), list):
        raise _refused(field, "it is no bucket (flattened_tensor, metadata)")
    parts, end = [], 0
    for each in content["metadata"]:
        facts = each.state if _called(each, METADATA) else each
        if not isinstance(facts, dict):
            raise _refused(field, "its metadata are none of tensors")
        name, dtype = facts.get("name"), facts.get("dtype")
        if not isinstance(name, str) or not isinstance(dtype, Name) or dtype not in TYPES:
            raise _refused(field, "its metadata are none of tensors")
        if facts.get("start_idx") != end:
            raise _refused(field, f"tensor {name!r} does not begin where the one before ends")
        end = _whole(facts.get("end_idx"), field)
        parts.append(TensorPart(name, dtype.name, _sizes(facts.get("shape"), field)))
    return [(tuple(parts), _shared(content.get("flattened_tensor"), field))]


# ---------------------------------------------------------------- a handle


def _shared(arguments: Any, field: str) -> SharedTensor:
    """Return the tensor that `rebuild_cuda_tensor` would make: of its arguments, or of a call."""
    if isinstance(arguments, Call) and arguments.name in REBUILDERS:
        arguments = arguments.args
    if not isinstance(arguments, tuple) or len(arguments) != NUM_ARGUMENTS:
        raise _refused(field, f"a handle does not have {NUM_ARGUMENTS} values")
    (
        _, shape, strides, offset, _, dtype, _, handle, nbytes, begin, _, counter, counter_place,
        event, waits,
    ) = arguments  # fmt: skip
    if not isinstance(dtype, Name) or dtype not in TYPES:
        raise _refused(field, "a handle has no type")
    shared = SharedTensor(
        dtype=dtype.name,
        shape=_sizes(shape, field),
        strides=_sizes(strides, field),
        offset=_whole(offset, field),
        handle=_bytes(handle, field),
        storage_bytes=_whole(nbytes, field),
        storage_begin=_whole(begin, field),
        counter=_bytes(counter, field),
        counter_place=_whole(counter_place, field),
        event=_bytes(event, field),
        waits=bool(waits) if isinstance(waits, bool | int) else True,
    )
    if len(shared.shape) != len(shared.strides):
        raise _refused(field, "a handle has another number of strides than of sizes")
    return shared


def _whole(value: Any, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise _refused(field, "a handle has something else than a whole number for one")
    return value


def _sizes(value: Any, field: str) -> tuple[int, ...]:
    if _called(value, SIZE) and len(value.args) == 1:
        [value] = value.args
    if not isinstance(value, list | tuple) or len(value) > MOST_DIMENSIONS:
        raise _refused(field, "a shape is no list of sizes")
    sizes = tuple(_whole(size, field) for size in value)
    if math.prod(sizes) >= 1 << 62:
        raise _refused(field, "a shape is too large")
    return sizes


def _bytes(value: Any, field: str) -> bytes:
    if not isinstance(value, bytes) or len(value) > LONGEST_HANDLE:
        raise _refused(field, "a handle is no short string of bytes")
    return value


def _refused(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {reason}", param=field)

"""Reads the handles of shared device memory that trainers send pickled, and nothing else.

A pickle may name any function of any module. Here it may name the few things that torch's handles
are made of, each of which becomes inert data; whatever else it names is refused. Without torch.
"""

from __future__ import annotations

import binascii
import io
import math
import pickle
from base64 import b64decode
from collections.abc import Callable
from typing import Any

from ..errors import InvalidRequest
from .safetensors_bytes import DTYPES
from .worker_jobs import SharedBucket, SharedTensor, TensorPart

MOST_DIMENSIONS = 16
LONGEST_HANDLE = 4096
NUM_ARGUMENTS = 15
"""Of `torch.multiprocessing.reductions.rebuild_cuda_tensor`."""
CLASSES = frozenset(
    {
        ("torch", "Tensor"), ("torch._tensor", "Tensor"), ("torch.nn.parameter", "Parameter"),
        ("torch", "UntypedStorage"), ("torch.storage", "UntypedStorage"),
        ("torch", "TypedStorage"), ("torch.storage", "TypedStorage"),
    }
)  # fmt: skip
"""Named in handles, and of no use here."""
REBUILDERS = frozenset(
    {
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
        ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
        ("sglang.srt.patch_torch", "_rebuild_cuda_tensor_modified"),
    }
)
METADATA = "FlattenedTensorMetadata"
"""SGLang's, of a tensor in a bucket."""
PER_RANK = "LocalSerializedTensor"
"""SGLang's, of a tensor that each rank has its own pickle of."""


class _Inert:
    """What a name stands for. It cannot be changed, and only called if it makes data."""

    __slots__ = ("_make", "name")

    def __init__(self, name: str, make: Callable[..., Any] | None = None) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "_make", make)

    def __setattr__(self, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"{self.name} is not to be changed")

    def __call__(self, *args: Any) -> Any:
        if self._make is None:
            raise pickle.UnpicklingError(f"{self.name} is not to be called")
        return self._make(*args)


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # Its own, as a pickle may set attributes of a class.
        self.metadata = type(METADATA, (), {})
        self.per_rank = type(PER_RANK, (), {})

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES.values():
            return _Inert(name)
        if (module, name) == ("torch", "Size"):
            return _Inert(name, tuple)
        if (module, name) in CLASSES:
            return _Inert(name)
        if (module, name) in REBUILDERS:
            return _Inert(name, lambda *args: args)
        if module.startswith("sglang.") and name == METADATA:
            return self.metadata
        if module.startswith("sglang.") and name == PER_RANK:
            return self.per_rank
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _read(encoded: str, field: str) -> tuple[Any, _Reader]:
    try:
        reader = _Reader(b64decode(encoded, validate=True))
        return reader.load(), reader
    except binascii.Error:
        raise _refused(field, "it is no base64") from None
    except RecursionError:
        raise _refused(field, "it is too deep") from None
    except Exception as error:
        raise _refused(field, f"{error}: only handles of CUDA tensors are read") from None


# ---------------------------------------------------------------- vLLM's


def read_vllm_handles(
    encoded: str, parts: tuple[TensorPart, ...], sizes: list[int] | None
) -> tuple[SharedBucket, ...]:
    """Return what `ipc_handles_pickled` refers to: a tensor per part, or with `sizes` (bytes per
    part) all of them in one. Raises InvalidRequest."""
    field = "ipc_handles_pickled"
    content, _ = _read(encoded, field)
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
    found = {}
    for device, arguments in content.items():
        if not isinstance(device, str):
            raise _refused(field, "a device is not named by its UUID")
        found[device] = _shared(arguments, field)
    return found


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


_OfRank = tuple[tuple[TensorPart, ...], SharedTensor]


def _named_of(text: str, field: str, rank: int) -> list[_OfRank]:
    content, reader = _read(text, field)
    if not isinstance(content, list | tuple):
        raise _refused(field, "it is no list of names and tensors")
    found = []
    for each in content:
        if not isinstance(each, list | tuple) or len(each) != 2 or not isinstance(each[0], str):
            raise _refused(field, "it is no list of names and tensors")
        name, arguments = each
        if isinstance(arguments, reader.per_rank):
            values = vars(arguments).get("values")
            if not isinstance(values, list) or rank >= len(values):
                raise _refused(field, f"tensor {name!r} is not there for rank {rank}")
            if not isinstance(values[rank], bytes):
                raise _refused(field, f"tensor {name!r} is no bytes")
            try:
                arguments = _Reader(values[rank]).load()
            except Exception as error:
                raise _refused(field, f"{error}: only handles of CUDA tensors are read") from None
        shared = _shared(arguments, field)
        found.append(((TensorPart(name, shared.dtype, shared.shape),), shared))
    return found


def _bucket_of(text: str, field: str) -> list[_OfRank]:
    content, reader = _read(text, field)
    if not isinstance(content, dict) or not isinstance(content.get("metadata"), list):
        raise _refused(field, "it is no bucket (flattened_tensor, metadata)")
    parts, end = [], 0
    for each in content["metadata"]:
        facts = vars(each) if isinstance(each, reader.metadata) else each
        if not isinstance(facts, dict):
            raise _refused(field, "its metadata are none of tensors")
        name, dtype = facts.get("name"), facts.get("dtype")
        if not isinstance(name, str) or not isinstance(dtype, _Inert):
            raise _refused(field, "its metadata are none of tensors")
        if facts.get("start_idx") != end:
            raise _refused(field, f"tensor {name!r} does not begin where the one before ends")
        end = _whole(facts.get("end_idx"), field)
        parts.append(TensorPart(name, dtype.name, _sizes(facts.get("shape"), field)))
    return [(tuple(parts), _shared(content.get("flattened_tensor"), field))]


# ---------------------------------------------------------------- a handle


def _shared(arguments: Any, field: str) -> SharedTensor:
    """Return the tensor that `rebuild_cuda_tensor` would make of its arguments."""
    if not isinstance(arguments, tuple) or len(arguments) != NUM_ARGUMENTS:
        raise _refused(field, f"a handle does not have {NUM_ARGUMENTS} values")
    (
        _, shape, strides, offset, _, dtype, _, handle, nbytes, begin, _, counter, counter_place,
        event, waits,
    ) = arguments  # fmt: skip
    if not isinstance(dtype, _Inert):
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

"""Weights in device memory that another process of the host shares."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import LoadError, listed
from ..live.worker_jobs import SharedBucket, SharedTensor
from ..loading.second_model import dtype_named, tensor_bytes

Take = Callable[[str, torch.Tensor], None]


def receive_shared(
    buckets: tuple[SharedBucket, ...], rank: int, device: torch.device, take: Take
) -> None:
    """Pass on all tensors, and wait until they are read. Raises LoadError."""
    names = (f"rank {rank}", _uuid(device))
    try:
        for bucket in buckets:
            place = next((bucket.places[name] for name in names if name in bucket.places), None)
            if place is None:
                raise LoadError(
                    f"there is no handle for rank {rank} on device {names[1]}, but for "
                    f"{listed(sorted(bucket.places))}"
                )
            _take_all(bucket, place, open_tensor(place, device), take)
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # Before the sender writes there again.
            torch.cuda.ipc_collect()


def _take_all(bucket: SharedBucket, place: SharedTensor, shared: torch.Tensor, take: Take) -> None:
    if len(bucket.parts) == 1 and bucket.parts[0].dtype == place.dtype:
        [part] = bucket.parts
        if part.shape != place.shape:
            raise LoadError(
                f"tensor {part.name!r} was announced as {part.shape}, and its handle is one of "
                f"{place.shape}"
            )
        take(part.name, shared)
        return
    begin = 0
    sizes = [tensor_bytes(part, dtype_named(part)) for part in bucket.parts]
    if not shared.is_contiguous() or sum(sizes) > shared.nbytes:
        raise LoadError(
            f"the bucket with tensor {bucket.parts[0].name!r} has {shared.nbytes} bytes, and its "
            f"tensors have {sum(sizes)}"
        )
    flat = shared.reshape(-1).view(torch.uint8)
    for part, size in zip(bucket.parts, sizes, strict=True):
        # A copy: the bytes of another type may begin anywhere.
        own = flat[begin : begin + size].clone()
        take(part.name, own.view(dtype_named(part)).view(part.shape))
        begin += size


def _uuid(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return str(torch.cuda.get_device_properties(device).uuid)


def open_tensor(place: SharedTensor, device: torch.device) -> torch.Tensor:
    """Return a tensor over another process's memory. Raises LoadError."""
    if device.type != "cuda":
        raise LoadError("handles are of CUDA tensors, and this engine runs on a CPU")
    dtype: torch.dtype = getattr(torch, place.dtype)
    last = place.offset + sum(
        (size - 1) * stride for size, stride in zip(place.shape, place.strides, strict=True)
    )
    if all(place.shape) and (last + 1) * dtype.itemsize > place.storage_bytes:
        raise LoadError(
            f"a tensor of {place.shape} does not fit into its storage of {place.storage_bytes} "
            "bytes"
        )
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    rebuild: Callable[..., torch.Tensor] = rebuild_cuda_tensor
    try:
        return rebuild(
            torch.Tensor, torch.Size(place.shape), place.strides, place.offset,
            torch.UntypedStorage, dtype, device.index, place.handle, place.storage_bytes,
            place.storage_begin, False, place.counter, place.counter_place, place.event,
            place.waits,
        )  # fmt: skip
    except RuntimeError as error:
        raise LoadError(
            f"a handle cannot be opened on {device}: {str(error).splitlines()[0]}"
        ) from error

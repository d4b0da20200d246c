"""Caches of several layers in one launch: kernels get the address of each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

ALIGNMENT = 16
"""Bytes of the widest load."""


@triton.jit
def cache_of_layer(addresses_ptr, layer, like_ptr, ALIGNED: tl.constexpr):
    """Return the pointer to a layer's cache, of like_ptr's type. ALIGNED: to `ALIGNMENT`, which
    the compiler cannot know of a number that it loads; without it, loads are of single numbers."""
    cache = tl.load(addresses_ptr + layer).to(tl.pointer_type(like_ptr.dtype.element_ty))
    if ALIGNED:
        cache = tl.multiple_of(cache, 16)
    return cache


@functools.lru_cache(maxsize=1024)
def _on_device(places: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # From pinned memory: the host does not wait for what the device has queued.
    sent = torch.tensor(places, dtype=torch.int64, pin_memory=device.type == "cuda")
    return sent.to(device, non_blocking=True)


def addresses_of(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Return the tensors' addresses, [len(parts)] int64 on their device, and whether all are
    aligned.
    """
    places = tuple(part.data_ptr() for part in parts)
    return _on_device(places, parts[0].device), all(place % ALIGNMENT == 0 for place in places)


def cache_addresses(caches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """`addresses_of` caches of one shape, strides and type."""
    first = caches[0]
    alike = (first.shape, first.stride(), first.dtype)
    assert all((cache.shape, cache.stride(), cache.dtype) == alike for cache in caches)
    return addresses_of(caches)

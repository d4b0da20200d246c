"""Sizes the KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from ...cache.groups import CacheGroup, TokenCache, longest_sequence, sequence_blocks
from ...config import EngineConfig
from ...errors import OutOfMemory

GIB = 1 << 30
MOST_EMPTY_BLOCKS = 1 << 18
"""Blocks without bytes: plenty, but few enough for lists."""
LEAST_LENGTH = 2
"""Tokens that must fit with an automatic `max_model_len`: a prompt's and one more."""

CACHE_LINE = 64
"""torch's alignment of tensors on a CPU."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU, pages are allocated when written, as programs use little of a
    cache.
    """
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
    begin = -pages.ctypes.data % CACHE_LINE
    return torch.from_numpy(pages[begin : begin + num_bytes]).view(dtype).view(*shape)


Zeros: TypeAlias = Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]
"""Makes a tensor of a cache, as `zeros` does."""


def bytes_per_token(spec: TokenCache) -> int:
    return sum(
        part.count * math.prod(part.shape) * getattr(torch, part.dtype).itemsize
        for part in spec.parts
    )


def allocate_cache(
    spec: TokenCache,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    make: Zeros = zeros,
) -> dict[str, torch.Tensor]:
    return {
        part.name: make(
            (part.count, num_blocks, block_size, *part.shape), getattr(torch, part.dtype), device
        )
        for part in spec.parts
    }


def bytes_per_block(
    specs: Sequence[TokenCache], groups: Sequence[CacheGroup], block_size: int
) -> int:
    """Return the bytes of a block over a group's layers; smaller groups waste some.

    specs: [num_layers]
    """
    sizes = [sum(bytes_per_token(specs[layer]) for layer in group.layers) for group in groups]
    return max(sizes) * block_size


@dataclass(frozen=True)
class CacheDemand:
    """A sequence's needs of the KV cache."""

    groups: Sequence[CacheGroup]
    block_bytes: int
    """Of one block; 0: blocks only count tokens."""
    block_size: int
    max_model_len: int
    max_chunk: int

    @property
    def num_blocks(self) -> int:
        return sequence_blocks(self.groups, self.max_model_len, self.block_size, self.max_chunk)

    def longest(self, available: int) -> int:
        """Return the longest sequence in `available` bytes (with the null block), up to
        `max_model_len`.
        """
        if not self.block_bytes:
            return self.max_model_len
        return self.longest_of(available // self.block_bytes)

    def longest_of(self, num_blocks: int) -> int:
        return longest_sequence(
            self.groups, num_blocks - 1, self.block_size, self.max_chunk, self.max_model_len
        )


def num_kv_blocks(config: EngineConfig, demand: CacheDemand, available: int) -> int:
    """Return the blocks for `available` bytes, with the null block.

    Raises OutOfMemory if `max_model_len` does not fit, or LEAST_LENGTH if automatic.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    per_sequence = demand.num_blocks
    useful = config.max_num_seqs * per_sequence + 1
    if not demand.block_bytes:
        return min(useful, max(MOST_EMPTY_BLOCKS, per_sequence + 1))
    blocks = min(available // demand.block_bytes, useful)
    if config.kv_cache_memory_bytes is not None:
        remedy = "raise kv_cache_memory_bytes"
    else:
        raise_what = "cpu_kvcache_space" if config.device == "cpu" else "gpu_memory_utilization"
        remedy = f"raise {raise_what} or lower max_num_batched_tokens"
    if config.max_model_len == "auto":
        least = min(demand.max_model_len, LEAST_LENGTH)
        if demand.longest_of(blocks) < least:
            raise OutOfMemory(
                f"the KV cache gets {_in_gib(available)} GiB, in which {demand.longest_of(blocks)}"
                f" tokens of one sequence fit; max_model_len=auto takes no less than {least}: "
                + remedy,
                param="max_model_len",
            )
    elif blocks < per_sequence + 1:
        needed = (per_sequence + 1) * demand.block_bytes
        fits = demand.longest(available)
        if fits >= LEAST_LENGTH:
            remedy = f"lower max_model_len (at most {fits} fits; auto takes that), or {remedy}"
        raise OutOfMemory(
            f"the KV cache gets {_in_gib(available)} GiB, but one sequence of max_model_len="
            f"{demand.max_model_len} needs {_in_gib(needed)} GiB; {remedy}",
            param="max_model_len",
        )
    return int(blocks)


def _in_gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size >= GIB / 10 else f"{size / GIB:.2g}"


def cache_space(config: EngineConfig, device: torch.device) -> int | None:
    """Return the bytes for blocks and states that the configuration states; None: what the rest
    leaves of the device.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    return int(config.cpu_kvcache_space * GIB) if device.type == "cpu" else None


def explain_oom(error: RuntimeError | MemoryError, doing: str) -> OutOfMemory:
    """Return advice after the device ran out of memory while `doing`."""
    reason, _, _ = str(error).partition("\n")
    return OutOfMemory(
        f"out of device memory while {doing}: lower gpu_memory_utilization (or "
        "kv_cache_memory_bytes), max_num_batched_tokens or max_num_seqs, or free memory that other "
        f"programs hold ({reason})"
    )

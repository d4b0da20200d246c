"""Sizes the KV cache, with a clear error if memory is not enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...cache.groups import CacheGroup, TokenCache, longest_sequence, sequence_blocks
from ...config import EngineConfig
from ...errors import OutOfMemory

GIB = 1 << 30
MOST_EMPTY_BLOCKS = 1 << 18
"""Blocks without bytes: enough for any use, and few enough for lists on the host."""
LEAST_LENGTH = 2
"""Tokens that must fit where `max_model_len` is auto: one of a prompt, and one that follows it."""

CACHE_LINE = 64
"""Bytes to whose multiple torch aligns its own tensors on a CPU."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU, pages take memory and time when they are first written, not now: most
    of a cache is never used by a short program."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
    begin = -pages.ctypes.data % CACHE_LINE
    return torch.from_numpy(pages[begin : begin + num_bytes]).view(dtype).view(*shape)


def bytes_per_token(spec: TokenCache) -> int:
    """Bytes that one layer caches per token."""
    return sum(
        part.count * math.prod(part.shape) * getattr(torch, part.dtype).itemsize
        for part in spec.parts
    )


def allocate_cache(
    spec: TokenCache, num_blocks: int, block_size: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return a layer's cache of zeros: part name → [count, num_blocks, block_size, *shape]."""
    return {
        part.name: zeros(
            (part.count, num_blocks, block_size, *part.shape), getattr(torch, part.dtype), device
        )
        for part in spec.parts
    }


def bytes_per_block(
    specs: Sequence[TokenCache], groups: Sequence[CacheGroup], block_size: int
) -> int:
    """Return the bytes of one block for all layers of a group; smaller groups leave a part unused.

    specs: [num_layers]
    """
    sizes = [sum(bytes_per_token(specs[layer]) for layer in group.layers) for group in groups]
    return max(sizes) * block_size


@dataclass(frozen=True)
class CacheDemand:
    """What one sequence takes of the KV cache."""

    groups: Sequence[CacheGroup]
    block_bytes: int
    """Of one block; 0: layers keep states alone, and blocks only count tokens."""
    block_size: int
    max_model_len: int
    max_chunk: int
    """Most tokens of a sequence per step."""

    @property
    def num_blocks(self) -> int:
        """Blocks of a sequence of `max_model_len`."""
        return sequence_blocks(self.groups, self.max_model_len, self.block_size, self.max_chunk)

    def longest(self, available: int) -> int:
        """Return the most tokens of a sequence that fits in `available` bytes, the null block
        included; at most `max_model_len`."""
        if not self.block_bytes:
            return self.max_model_len
        return self.longest_of(available // self.block_bytes)

    def longest_of(self, num_blocks: int) -> int:
        """Return the same for so many blocks."""
        return longest_sequence(
            self.groups, num_blocks - 1, self.block_size, self.max_chunk, self.max_model_len
        )


def num_kv_blocks(config: EngineConfig, demand: CacheDemand, available: int) -> int:
    """Return the number of blocks, the null block included, for `available` bytes.

    Raises OutOfMemory if one sequence of `max_model_len` does not fit; where that is auto, if
    fewer than LEAST_LENGTH tokens do.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    per_sequence = demand.num_blocks
    useful = config.max_num_seqs * per_sequence + 1
    if not demand.block_bytes:
        return min(useful, max(MOST_EMPTY_BLOCKS, per_sequence + 1))
    blocks = min(available // demand.block_bytes, useful)
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


def explain_oom(error: RuntimeError | MemoryError, doing: str) -> OutOfMemory:
    """Return advice for the case that the device ran out of memory while `doing`."""
    reason, _, _ = str(error).partition("\n")
    return OutOfMemory(
        f"out of device memory while {doing}: lower gpu_memory_utilization, max_num_batched_tokens "
        f"or max_num_seqs, or free memory that other programs hold ({reason})"
    )

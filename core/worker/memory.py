"""How much memory the KV cache gets, and clear words when it is not enough."""

from __future__ import annotations

import torch

from ..config import EngineConfig
from ..errors import OutOfMemory
from ..protocols import AttentionSpec

GIB = 1 << 30


def bytes_per_block(specs: list[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block, all layers."""
    per_token = sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs)
    return per_token * block_size * dtype.itemsize


def num_kv_blocks(
    config: EngineConfig,
    *,
    available: int,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
) -> int:
    """Blocks, the null block included, for `available` bytes.

    Raises OutOfMemory when not even one sequence of `max_model_len` fits.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    per_sequence = -(-max_model_len // block_size)
    useful = config.max_num_seqs * per_sequence + 1
    blocks = min(available // block_bytes, useful)
    if blocks < per_sequence + 1:
        fits = max(blocks - 1, 0) * block_size
        raise OutOfMemory(
            f"the KV cache gets {available / GIB:.2f} GiB, but one sequence of max_model_len="
            f"{max_model_len} needs {(per_sequence + 1) * block_bytes / GIB:.2f} GiB; lower "
            f"max_model_len (at most {fits} fits), or raise "
            + ("cpu_kvcache_space" if config.device == "cpu" else "gpu_memory_utilization")
            + " or lower max_num_batched_tokens",
            param="max_model_len",
        )
    return int(blocks)


def explain_oom(error: RuntimeError, doing: str) -> OutOfMemory:
    """What to change when the device ran out of memory while `doing`."""
    return OutOfMemory(
        f"out of device memory while {doing}: lower gpu_memory_utilization, max_num_batched_tokens "
        f"or max_num_seqs, or free memory that other programs hold ({str(error).splitlines()[0]})"
    )

"""Logs what an engine serves, once it has started."""

from __future__ import annotations

import logging

from ..cache.groups import sequence_blocks
from ..config import EngineConfig
from ..loading.generation_config import NO_DEFAULTS
from ..loading.model_config import ModelConfig
from ..protocols.executors import ExecutorInfo

logger = logging.getLogger("jackfield.engine")


def log_start(
    seconds: float, config: EngineConfig, model_config: ModelConfig, info: ExecutorInfo
) -> None:
    """Log the model, where it runs, and the room in its caches. seconds: of the start."""
    if info.num_snapshots is not None and config.enable_prefix_caching:
        logger.info("prefix caching: room for %d states", info.num_snapshots)
    logger.info(
        "ready in %.1f s: %s on %s (%s), attention %s (%s), %d KV blocks of %d tokens%s",
        seconds,
        model_config.architecture,
        info.where,
        info.dtype,
        info.attention_backend,
        info.attention_reason,
        info.num_blocks,
        config.block_size,
        _room(config, model_config.max_model_len, info),
    )
    if model_config.sampling != NO_DEFAULTS:
        logger.info("requests that leave it open get %s", model_config.sampling)


def _room(config: EngineConfig, max_model_len: int, info: ExecutorInfo) -> str:
    """Return how many of the longest requests the KV cache holds, as the end of a sentence."""
    assert config.max_num_batched_tokens is not None
    if not info.num_blocks:
        return ""
    blocks = sequence_blocks(
        info.cache_groups, max_model_len, config.block_size, config.max_num_batched_tokens
    )
    return f": {(info.num_blocks - 1) / blocks:.1f} requests of {max_model_len} tokens at once"

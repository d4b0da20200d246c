"""The layers' caches: their type, which layers share a block table, and their memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import torch
from torch import nn

from ...cache.groups import CacheGroup, form_groups
from ...config import EngineConfig
from ...errors import ConfigError
from ...nn.attention import Attention
from ...protocols.attention import AttentionBackend
from .memory import allocate_cache

logger = logging.getLogger("jackfield.worker")

KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def kv_cache_dtype(model: nn.Module, config: EngineConfig, model_dtype: torch.dtype) -> torch.dtype:
    """Return the type of cached keys and values: the model's, or fp8 where that is chosen.

    Raises ConfigError for any other type.
    """
    name = config.kv_cache_dtype
    if name == "auto":
        name = getattr(model, "kv_cache_dtype", None) or name
    dtype = KV_DTYPES.get(name, model_dtype)
    if dtype != model_dtype and not is_fp8(dtype):
        raise ConfigError(
            f"kv_cache_dtype: {config.kv_cache_dtype} differs from the model's "
            f"{model_dtype}, which is not supported",
            param="kv_cache_dtype",
        )
    return dtype


def is_fp8(dtype: torch.dtype) -> bool:
    """Return whether a cache of this type has scales."""
    return dtype.itemsize == 1


def set_checkpoint_scales(layers: Sequence[Attention]) -> None:
    """Give each layer of an fp8 cache the scales that its checkpoint has, else 1."""
    for layer in layers:
        key_scale, value_scale = layer.cache_scales
        layer.spec = msgspec.structs.replace(
            layer.spec, key_scale=key_scale, value_scale=value_scale
        )


def form_cache_groups(
    layers: Sequence[Attention],
    dtype: torch.dtype,
    backend_class: type[AttentionBackend],
    config: EngineConfig,
    max_model_len: int,
) -> tuple[CacheGroup, ...]:
    """Return the groups of layers that share a block table: one for all layers if a backend or
    a KV connector supports no other grouping."""
    groups = form_groups(
        [layer.cache_spec(dtype) for layer in layers],
        max_model_len=max_model_len,
        block_size=config.block_size,
    )
    if any(group.window is not None for group in groups):
        reason = None
        if not backend_class.cache_groups:
            reason = f"attention backend {backend_class.name} reads them"
        if config.kv_transfer_config is not None:
            reason = f"KV connector {config.kv_transfer_config.kv_connector} moves them"
        if reason is not None:
            logger.info("blocks behind sliding windows stay in the cache: %s", reason)
            return (CacheGroup(tuple(range(len(layers)))),)
    return groups


def bind_cache(
    layers: Sequence[Attention],
    groups: Sequence[CacheGroup],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[dict[str, torch.Tensor]]:
    """Allocate the cache. Layers at the same index of different groups share memory, but no
    blocks. Return the parts at each index."""
    shared: list[dict[str, torch.Tensor]] = []
    for number, group in enumerate(groups):
        for place, layer in enumerate(layers[index] for index in group.layers):
            if place == len(shared):
                spec = layer.cache_spec(dtype)
                shared.append(allocate_cache(spec, num_blocks, block_size, device))
            layer.group = number
            layer.bind(shared[place])
    return shared

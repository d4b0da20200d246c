"""Allocation of layers' caches, and their grouping."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from ...cache.groups import CacheGroup, TokenCache, form_groups, one_group
from ...config import EngineConfig
from ..selection import CacheLayer
from .memory import Zeros, allocate_cache, zeros

logger = logging.getLogger("jackfield.worker")


def form_cache_groups(
    specs: Sequence[TokenCache],
    refusal: str | None,
    config: EngineConfig,
    max_model_len: int,
) -> tuple[CacheGroup, ...]:
    """Return the groups of layers with a common block table: one, if a backend or connector
    requires it, or if layers store different things.

    specs: of all stages' layers; refusal: the backend's reason for one group, or None.
    """
    groups = form_groups(
        specs,
        max_model_len=max_model_len,
        block_size=config.block_size,
    )
    reaches = {spec.reach for spec in specs}
    if len(groups) == 1 and len(reaches) > 1 and len({spec.parts for spec in specs}) > 1:
        logger.info("blocks out of reach stay in the cache: layers store different things")
    if any(group.reach is not None for group in groups):
        reason = refusal
        if config.kv_transfer_config is not None:
            reason = f"KV connector {config.kv_transfer_config.kv_connector} moves them"
        if reason is not None:
            logger.info("blocks out of reach stay in the cache: %s", reason)
            return (one_group([spec.reach for spec in specs]),)
    return groups


def bind_cache(
    layers: Sequence[CacheLayer],
    groups: Sequence[CacheGroup],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    own_blocks: Mapping[CacheLayer, int] | None = None,
    make: Zeros = zeros,
) -> list[dict[str, torch.Tensor]]:
    """Allocate the cache; layers at the same index of different groups share memory, but no blocks.
    Return the parts at each index.

    own_blocks: of layers that have more at the end than those of requests. make: makes tensors.
    """
    more: dict[int, int] = {}
    for group in groups:
        for place, index in enumerate(group.layers):
            extra = (own_blocks or {}).get(layers[index], 0)
            more[place] = max(extra, more.get(place, 0))
    shared: list[dict[str, torch.Tensor]] = []
    for number, group in enumerate(groups):
        for place, layer in enumerate(layers[index] for index in group.layers):
            if place == len(shared):
                spec = layer.cache_spec(dtype)
                blocks = num_blocks + more[place]
                shared.append(allocate_cache(spec, blocks, block_size, device, make))
            layer.group = number
            layer.bind(shared[place])
    return shared

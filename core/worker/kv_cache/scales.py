"""Scales of an fp8 cache from the first step: `calculate_kv_scales`.

A layer's values share a constant scale, known only once computed. So the first step fixes it
between projection and caching; graphs are recorded afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from ...config import EngineConfig
from ...errors import ConfigError
from ...nn.attention import Attention
from ...nn.context import ForwardContext
from ...nn.norm import RMSNorm
from ...nn.rotary import Rotary
from ...parallel.ranks import ONE_RANK, Ranks
from ...protocols.attention import AttentionSpec

logger = logging.getLogger("jackfield.worker")

KEY_RANGE, VALUE_RANGE = 200.0, 100.0
"""Stored magnitude of the first step's largest key and value (vLLM's constants), with headroom up
to 448 (e4m3) or 57344 (e5m2)."""


def unscaled(layers: Sequence[Attention], config: EngineConfig, fp8_cache: bool) -> list[Attention]:
    """Return the layers without scales in the checkpoint.

    Raises ConfigError unless the cache is fp8.
    """
    if not config.calculate_kv_scales:
        return []
    if not fp8_cache:
        raise ConfigError(
            f"calculate_kv_scales: only an fp8 cache has scales, and kv_cache_dtype is "
            f"{config.kv_cache_dtype}",
            param="calculate_kv_scales",
        )
    return [layer for layer in layers if layer.cache_scales == (1.0, 1.0)]


def to_be_scaled(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec that a backend must support with scales."""
    return msgspec.structs.replace(spec, key_scale=0.5, value_scale=0.5)


@contextlib.contextmanager
def finding_scales(layers: Sequence[Attention], ranks: Ranks = ONE_RANK) -> Iterator[None]:
    """Context in which a forward pass sets these layers' scales, from all ranks' largest values."""
    fix = functools.partial(_fix, ranks)
    handles = [layer.register_forward_pre_hook(fix, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    keys, values = (
        [getattr(layer.spec, name) for layer in layers] for name in ("key_scale", "value_scale")
    )
    logger.info(
        "scales of the KV cache: keys %.3g to %.3g, values %.3g to %.3g",
        min(keys), max(keys), min(values), max(values),
    )  # fmt: skip


def _fix(
    ranks: Ranks, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert isinstance(layer, Attention)
    key, value = _keys_and_values(layer, *args, **kwargs)
    layer.spec = msgspec.structs.replace(
        layer.spec,
        key_scale=_scale(ranks, key, KEY_RANGE),
        value_scale=_scale(ranks, value, VALUE_RANGE),
    )


def _keys_and_values(
    layer: Attention,
    qkv: torch.Tensor,
    context: ForwardContext,
    *,
    rotary: Rotary | None = None,
    query_norm: RMSNorm | None = None,
    key_norm: RMSNorm | None = None,
    **_others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, key, value = layer.operations.heads(
        qkv.clone(),
        layer.layout,
        context.positions,
        rotary.cos_sin if rotary else None,
        query_norm.norm if query_norm else None,
        key_norm.norm if key_norm else None,
    )
    return key, value


def _scale(ranks: Ranks, part: torch.Tensor, reach: float) -> float:
    """Return the divisor, ignoring a request's overflows."""
    own = part.float().abs().nan_to_num(nan=0.0, posinf=0.0).amax()
    largest = float(ranks.tensor.all_gather(own[None]).amax())
    return largest / reach if largest > 0 else 1.0

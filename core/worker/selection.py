"""Layers with caches, and attention backends for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn

from ..config import EngineConfig
from ..errors import ConfigError
from ..nn.attention import Attention
from ..nn.latent.layer import LatentAttention
from ..nn.operations import Operations
from ..protocols.attention import AttentionBackend, LayerSpec, PagedBackend
from ..protocols.latent_attention import LatentAttentionBackend, LatentAttentionSpec

CacheLayer: TypeAlias = Attention | LatentAttention
"""A layer with paged entries per token."""

WIDE_CACHES = ("auto", "bfloat16", "float16", "float32")
"""`EngineConfig.kv_cache_dtype` values that store computed numbers."""


def cache_layers(model: nn.Module) -> list[CacheLayer]:
    return [m for m in model.modules() if isinstance(m, Attention | LatentAttention)]


def backend_kind(layers: Sequence[CacheLayer]) -> str:
    """Return the plugin kind for these layers."""
    latent = any(isinstance(layer, LatentAttention) for layer in layers)
    return "latent_attention_backend" if latent else "attention_backend"


def attention_refusal(
    backend: type[PagedBackend], spec: LayerSpec, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why `backend` cannot serve a layer, or None."""
    latent = isinstance(spec, LatentAttentionSpec)
    base: type[PagedBackend] = LatentAttentionBackend if latent else AttentionBackend
    if not (isinstance(backend, type) and issubclass(backend, base)):
        return f"it does not subclass jackfield.core.protocols.{base.__name__}"
    if unknown := spec.features - backend.features:
        return f"it has no {', '.join(sorted(unknown))}"
    return backend.supports(spec, device, dtype)


def invariance_refusal(
    candidate: type[Operations | PagedBackend], config: EngineConfig
) -> str | None:
    """Return why operations or a backend do not serve an engine whose results must not depend on
    the batch, or None."""
    if config.batch_invariant and not candidate.batch_invariant:
        return "it is not batch-invariant (batch_invariant)"
    return None


def keys_and_values(layers: Sequence[CacheLayer], config: EngineConfig) -> list[Attention]:
    """Return the layers with keys and values. Raises ConfigError, with the option's name, if others
    exist under such an option.
    """
    own = [layer for layer in layers if isinstance(layer, Attention)]
    if len(own) == len(layers):
        return own
    refused = {
        "calculate_kv_scales": (config.calculate_kv_scales, "only keys and values have scales"),
        "kv_cache_dtype": (
            config.kv_cache_dtype not in WIDE_CACHES,
            "latents are cached in the model's type",
        ),
    }
    for name, (is_set, reason) in refused.items():
        if is_set:
            raise ConfigError(
                f"{name}: this model caches latents instead of keys and values, and {reason}",
                param=name,
            )
    return own

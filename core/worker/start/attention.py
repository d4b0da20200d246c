"""Chooses the attention backend for a model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...config import EngineConfig
from ...protocols.attention import AttentionBackend, LayerSpec, PagedBackend
from ...registration.choice import choose
from ...registry import Plugins
from ..kv_cache.formats import CacheFormats
from ..kv_cache.states import NoAttention
from ..selection import attention_refusal


class ChosenBackend(NamedTuple):
    """An attention backend, and why it was chosen."""

    kind: str
    """The registry that has it."""
    name: str
    backend_class: type[PagedBackend]
    reason: str


NO_ATTENTION = ChosenBackend("attention_backend", NoAttention.name, NoAttention, "no layer attends")
"""The backend of a model whose layers only keep states."""


def choose_attention(
    plugins: Plugins,
    config: EngineConfig,
    kind: str,
    specs: Sequence[LayerSpec],
    device: torch.device,
    dtype: torch.dtype,
    *,
    formats: CacheFormats,
    compacts: bool,
    drafts: bool,
) -> ChosenBackend:
    """Return the backend that the configuration names, or the first that serves all layers.

    kind: the registry; specs: [num_layers]; compacts: with KV compression; drafts: with speculative
    decoding. Raises ConfigError if none can.
    """
    if not specs:
        return NO_ATTENTION

    def refusal(backend: type[PagedBackend]) -> str | None:
        if drafts and not getattr(backend, "bounded_lengths", False):
            return "it needs lengths that only the device knows (speculative_config)"
        if isinstance(backend, type) and issubclass(backend, AttentionBackend):
            if compacts and not (backend.compacted_cache and backend.standard_cache):
                return "it reads no compacted cache (kv_compression)"
            if formats.fp8_cache and not backend.fp8_cache:
                return "it reads no fp8 cache (kv_cache_dtype)"
            if formats.quantized and formats.quantized not in backend.cache_formats:
                return f"it reads no {formats.quantized} cache (kv_cache_dtype)"
        reasons = (attention_refusal(backend, spec, device, dtype) for spec in specs)
        return next((reason for reason in reasons if reason is not None), None)

    chosen = choose(plugins[kind], "attention_backend", config.attention_backend, refusal)
    return ChosenBackend(kind, *chosen)

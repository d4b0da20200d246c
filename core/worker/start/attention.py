"""Chooses the attention backend for a model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...config import EngineConfig
from ...nn.context import BatchLayout
from ...protocols.attention import (
    AttentionBackend,
    AttentionSpec,
    BackendSetup,
    LayerSpec,
    PagedBackend,
)
from ...registration.choice import choose
from ...registry import Plugins
from ..kv_cache.formats import CacheFormats
from ..parts.part import PartNeeds
from ..selection import attention_refusal, invariance_refusal


class ChosenBackend(NamedTuple):
    kind: str
    name: str
    backend_class: type[PagedBackend]
    reason: str


class NoAttention(AttentionBackend):
    """For models without attention."""

    name = "none"
    graph_safe = mixed_graph_safe = cache_groups = True

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str:
        return "it serves models without attention"

    def __init__(self, setup: BackendSetup) -> None:
        """The setup is not used."""

    def build_metadata(self, layout: BatchLayout) -> None:
        """Do nothing."""

    def forward(self, *arguments: Any, **more: Any) -> torch.Tensor:
        raise NotImplementedError("a layer attends, in a model chosen to have none that does")


NO_ATTENTION = ChosenBackend("attention_backend", NoAttention.name, NoAttention, "no layer attends")
"""For models with states only."""


def choose_attention(
    plugins: Plugins,
    config: EngineConfig,
    kind: str,
    specs: Sequence[LayerSpec],
    device: torch.device,
    dtype: torch.dtype,
    *,
    formats: CacheFormats,
    needs: Sequence[PartNeeds] = (),
) -> ChosenBackend:
    """Return the configured backend, or the first that serves all layers.

    kind: registry; specs: [num_layers]; needs: of parts. Raises ConfigError.
    """
    if not specs:
        return NO_ATTENTION

    def refusal(backend: type[PagedBackend]) -> str | None:
        if (reason := invariance_refusal(backend, config)) is not None:
            return reason
        for need in needs:
            if need.refuses is not None and (reason := need.refuses(backend)) is not None:
                return reason
        if isinstance(backend, type) and issubclass(backend, AttentionBackend):
            if formats.fp8_cache and not backend.fp8_cache:
                return "it reads no fp8 cache (kv_cache_dtype)"
            if formats.quantized and formats.quantized not in backend.cache_formats:
                return f"it reads no {formats.quantized} cache (kv_cache_dtype)"
        reasons = (attention_refusal(backend, spec, device, dtype) for spec in specs)
        return next((reason for reason in reasons if reason is not None), None)

    chosen = choose(plugins[kind], "attention_backend", config.attention_backend, refusal)
    return ChosenBackend(kind, *chosen)

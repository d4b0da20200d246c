"""A layer's attention in a step, and the launches of the kernels that compute it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...core.nn.context import BatchLayout
from ...core.nn.kv_cache.quantized_cache import KVCache
from ...core.protocols.attention import AttentionSpec
from ...kernels.attention.leveled_attention import leveled_attention
from ...kernels.attention.paged_attention_decode import paged_attention_decode
from ...kernels.attention.paged_attention_prefill import paged_attention_prefill
from ...kernels.attention.quantized_tiles import is_narrow
from ...kernels.attention.shared_prefix import MAX_PREFIX_HEAD_DIM, PrefixSums, attend_prefix


class LayerCall(NamedTuple):
    """The arguments that a layer's kernels share. Each launch writes the rows it computes."""

    spec: AttentionSpec
    query: torch.Tensor
    """[num_tokens, num_heads, head_dim]"""
    kv_cache: KVCache
    layout: BatchLayout
    alibi_slopes: torch.Tensor | None
    """[num_heads] float32"""
    distance_bias: torch.Tensor | None
    sinks: torch.Tensor | None
    out: torch.Tensor
    """As `query`, contiguous."""

    def _terms(self) -> dict[str, Any]:
        """Return what is added to logits and to the softmax's sum, with the layer's arguments."""
        return {
            **layer_arguments(self.spec),
            "alibi_slopes": self.alibi_slopes,
            "distance_bias": self.distance_bias,
            "sinks": self.sinks,
        }

    def decode(
        self, rows: int, num_splits: int, workspace: torch.Tensor, width: int = 1, **more: Any
    ) -> None:
        """Compute the first `rows` rows, of `width` tokens each."""
        tokens = rows * width
        paged_attention_decode(
            self.query[:tokens], self.kv_cache, self.layout.block_table, self.layout.seq_lens,
            **self._terms(), num_splits=num_splits, workspace=workspace, out=self.out[:tokens],
            width=width, **more,
        )  # fmt: skip

    def shared_prefix(
        self, rows: int, num_splits: int, workspace: torch.Tensor, bounds: torch.Tensor | None
    ) -> PrefixSums:
        """Attend to the prefix of the first `rows` rows, or of bounds[0] of them."""
        assert self.layout.shared_prefix is not None, "rows share a prefix"
        assert isinstance(self.kv_cache, torch.Tensor), "each row reads codes by itself"
        return attend_prefix(
            self.query[:rows], self.kv_cache, self.layout.block_table, self.layout.shared_prefix,
            scale=self.spec.scale, soft_cap=self.spec.soft_cap, num_splits=num_splits,
            workspace=workspace, bounds=bounds,
        )  # fmt: skip

    def prefill(self, max_query_len: int, **more: Any) -> None:
        """Compute rows of any lengths by the prefill kernel."""
        paged_attention_prefill(
            self.query, self.kv_cache, self.layout.block_table, self.layout.query_start,
            self.layout.seq_lens, **self._terms(), max_query_len=max_query_len,
            out=self.out, **more,
        )  # fmt: skip

    def leveled(self, max_query_len: int, **more: Any) -> None:
        """Compute rows of any lengths whose cache is in levels."""
        layout, levels = self.layout, self.layout.levels
        assert levels is not None and layout.slots is not None, "as levels need them"
        assert isinstance(self.kv_cache, torch.Tensor), "levels are of caches in the model's type"
        leveled_attention(
            self.query, self.kv_cache, layout.block_table, layout.query_start, layout.seq_lens,
            levels.tokens, levels.formats, layout.slots, scale=self.spec.scale,
            max_query_len=max_query_len, soft_cap=self.spec.soft_cap, sinks=self.sinks,
            out=self.out, **more,
        )  # fmt: skip


def may_share(spec: AttentionSpec) -> bool:
    """Return whether decode rows may read once what they share: in no layer where that depends on
    the distance."""
    return (
        spec.reach is None
        and spec.alibi_slopes is None
        and not spec.distance_bias
        and spec.head_dim <= MAX_PREFIX_HEAD_DIM
    )


def reads_prefix_once(spec: AttentionSpec, kv_cache: KVCache, layout: BatchLayout) -> bool:
    """Return whether a layer's decode rows read once what they share in this step."""
    return layout.shared_prefix is not None and may_share(spec) and not is_narrow(kv_cache)


def layer_arguments(spec: AttentionSpec) -> dict[str, Any]:
    """Return the arguments of a layer that all kernels take."""
    return {
        "scale": spec.scale,
        "sliding_window": spec.sliding_window,
        "attention_chunk_size": spec.attention_chunk_size,
        "chunk_lookback": spec.chunk_lookback,
        "soft_cap": spec.soft_cap,
        "cache_scales": (spec.key_scale, spec.value_scale),
    }

"""Parts that several families of decoders share: positions, norms, and names of older
checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder, WeightMap
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.embedding import Embedding
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import PlainMLP
from ...core.nn.norm import LayerNorm, RMSNorm
from ...core.nn.operations import CenteredNorm, PositionRows
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from ...core.parallel.missing_layer import MissingLayer
from ...core.parallel.sharding import Sharding
from .blocks import Block, BlockParts, ParallelBlock, SelfAttention
from .decoder import Decoder

# ---------------------------------------------------------------- blocks


class LayerNormBlock(Block):
    norm = LayerNorm


class LayerNormDecoder(Decoder):
    block: ClassVar[type[Block]] = LayerNormBlock


class ParallelLayerNormBlock(ParallelBlock):
    norm = LayerNorm


class ParallelLayerNormDecoder(Decoder):
    block = ParallelLayerNormBlock


INNER_SIZES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
ACTIVATION_FIELDS = ("hidden_act", "activation_function", "activation")
BIAS_FIELDS = ("mlp_bias", "use_bias", "enable_bias", "bias")


def plain_mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
    """Create an MLP without a gate: a `MakeMLP`.

    Reads sizes, activation and biases under the names that families use; by default 4 *
    hidden_size, with biases.
    """
    hf: Any = config.hf_config
    sizes = (getattr(hf, name, None) for name in INNER_SIZES)
    field = next(name for name in ACTIVATION_FIELDS if hasattr(hf, name))
    return PlainMLP(
        hf.hidden_size,
        next(filter(None, sizes), 4 * hf.hidden_size),
        getattr(hf, field),
        build,
        bias=next((bool(getattr(hf, name)) for name in BIAS_FIELDS if hasattr(hf, name)), True),
        field=field,
    )


def renormalized_mixture(hf: Any, build: BuildContext, **options: Any) -> SparseMLP:
    """Create a mixture whose weights sum to 1 per token. options: of `SparseMLP`."""
    return SparseMLP(
        hf.num_local_experts, RoutingRule(hf.num_experts_per_tok, renormalize=True),
        hf.hidden_size, hf.intermediate_size, hf.hidden_act, build, **options,
    )  # fmt: skip


# ---------------------------------------------------------------- positions


def alibi_slopes(num_heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return a slope for each head, 2^-largest the smallest.

    Source: ALiBi (arXiv 2108.12409), and its code for head counts other than powers of two.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-largest * head / power) for head in range(1, power + 1)]
    return tuple(slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


class UnrotatedDecoder(Decoder):
    """No layer rotates: positions are slopes or embeddings."""

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        return [None] * config.num_layers


class PositionDecoder(UnrotatedDecoder):
    offset: ClassVar[int] = 0

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        config, build = parts.config, parts.build
        rows = config.hf_config.max_position_embeddings + self.offset
        self.embed_positions: Any = MissingLayer()
        if build.ranks.pipeline.first:
            self.embed_positions = Embedding(rows, config.hidden_size, build)

    def position_rows(self, positions: torch.Tensor) -> PositionRows:
        return PositionRows(positions, self.embed_positions.weight[self.offset :])


# ---------------------------------------------------------------- attention


class FusedAttention(SelfAttention):
    """Queries, keys and values are one checkpoint tensor, which `grouped_rows` may reorder."""

    fused = True


class HeadNormAttention(SelfAttention):
    """Optional `q_layernorm` and `k_layernorm` norm queries and keys before the rotation.

    For other norms than an RMSNorm per head, which is `q_norm` and `k_norm`: kernels fuse those
    with the rotation.
    """

    q_layernorm: nn.Module
    k_layernorm: nn.Module

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        query_norm, key_norm = (
            getattr(self, name, None) for name in ("q_layernorm", "k_layernorm")
        )
        if isinstance(query_norm, HEAD_NORMS) and isinstance(key_norm, HEAD_NORMS):
            attention = self.attention
            attention.operations.norm_heads(qkv, attention.layout, query_norm.norm, key_norm.norm)
            return super().heads(qkv, rotary, context)
        start = 0
        for norm, heads in ((query_norm, self.num_heads), (key_norm, self.num_kv_heads)):
            part = qkv[:, start : start + heads * self.head_dim]
            start += heads * self.head_dim
            if norm is not None:
                view = part.view(-1, heads, self.head_dim)
                view.copy_(norm(view))
        return super().heads(qkv, rotary, context)


class ClippedAttention(SelfAttention):
    """Clips queries, keys and values to ±`clip`."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        self.limit = self.clip(config.hf_config)

    @staticmethod
    def clip(hf: Any) -> float | None:
        raise NotImplementedError

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        if self.limit is not None:
            qkv.clamp_(-self.limit, self.limit)
        return super().heads(qkv, rotary, context)


class RotatedFirstAttention(SelfAttention):
    """Queries and keys are rotated, then normed by `q_norm` and `k_norm`."""

    norm_last = True


def grouped_rows(config: ModelConfig, kv_heads: int) -> RowOrder:
    """Return the order for a tensor [kv_heads, (queries of the group, key, value), head_dim]."""
    group, size = config.num_heads // kv_heads, config.head_dim
    heads = [range(group), range(group, group + 1), range(group + 1, group + 2)]
    return RowOrder(tuple(
        (kv_head * (group + 2) + head) * size + row
        for part in heads for kv_head in range(kv_heads) for head in part for row in range(size)
    ))  # fmt: skip


# ---------------------------------------------------------------- norms


class OffsetLayerNorm(LayerNorm):
    """(x - mean) / deviation * (1 + weight) + bias. The sum is rounded to the weight's type, as in
    training.
    """

    def after_loading(self) -> None:
        self.weight.data.add_(1.0)


class WeightlessLayerNorm(LayerNorm):
    """(x - mean) / deviation"""

    def __init__(self, size: int, eps: float, build: BuildContext) -> None:
        super().__init__(size, eps, build, bias=False)
        ones = torch.ones_like(self.weight)
        del self.weight
        self.register_buffer("weight", ones, persistent=False)


class WeightlessRMSNorm(RMSNorm):
    """x / rms(x)"""

    def __init__(self, size: int, eps: float, build: BuildContext) -> None:
        super().__init__(size, eps, build)
        ones = torch.ones_like(self.weight)
        del self.weight
        self.register_buffer("weight", ones, persistent=False)


class HeadsLayerNorm(nn.Module):
    """(x - mean) / deviation * weight over each head, which has factors of its own.

    weight: [num_heads, head_dim], as checkpoints have it.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        own: slice,
        eps: float,
        build: BuildContext,
        order: RowOrder | None = None,
    ) -> None:
        """`own`: this rank's heads; `order`: row order of the heads' projection."""
        super().__init__()
        self.shardings = {"weight": Sharding(0, {"": num_heads}, {"": (own,)})}
        self.weight = nn.Parameter(build.empty(own.stop - own.start, head_dim))
        self.eps, self.order = eps, order

    def after_loading(self) -> None:
        if self.order is not None:
            self.weight.data = self.order.apply("weight", self.weight.data.t()).t().contiguous()

    @property
    def norm(self) -> CenteredNorm:
        return CenteredNorm(self.weight, None, self.eps)


HEAD_NORMS = (LayerNorm, HeadsLayerNorm)


# ---------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class OldWeightMap(WeightMap):
    """For checkpoints that hold attention masks, or matrices as [in_features, out_features]."""

    masks: tuple[str, ...] = ()
    """Name suffixes of tensors that are not weights."""
    transposed: tuple[str, ...] = ()
    """Name suffixes of transposed matrices."""

    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        if not name.endswith(self.masks):
            yield from super().pieces(name, tensor.t() if self.is_transposed(name) else tensor)

    def is_transposed(self, name: str) -> bool:
        return name.endswith(self.transposed)

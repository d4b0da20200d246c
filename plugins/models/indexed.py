"""Latent attention to the tokens that an indexer chooses (DeepSeek Sparse Attention, arXiv
2512.02556), in layers that have an indexer or share an earlier layer's choice (arXiv 2603.12201).
Index keys are stored in the model's type; DeepSeek's code stores fp8 after a Hadamard rotation,
which changes no product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.latent.layer import LatentAttention
from ...core.nn.linear import Linear
from ...core.nn.norm import LayerNorm, RMSNorm
from ...core.nn.rotary import Rotary
from ...core.parallel.ranks import Pipeline
from ...core.protocols.field_kinds import FLAG, SIZE, TEXTS, FieldKind
from ...core.protocols.latent_attention import ChosenTokens
from .blocks import Block, BlockParts
from .latent import LatentDecoder, LatentSelfAttention

INDEXED: dict[str, FieldKind] = {
    **dict.fromkeys(("index_topk", "index_n_heads", "index_head_dim"), SIZE),
    "indexer_rope_interleave": FLAG,
    "indexer_types": TEXTS,
}
KINDS = ("full", "shared")
"""Layers with an indexer, and layers that share the previous one's choice."""


def chooses(config: ModelConfig) -> bool:
    """Return whether a text may be so long that indexers omit tokens."""
    return config.max_model_len > int(config.hf_config.index_topk)


def has_indexer(hf: Any, layer: int) -> bool:
    kinds = getattr(hf, "indexer_types", None)
    return kinds is None or kinds[layer] == "full"


def check_indexers(config: ModelConfig) -> None:
    """Raise ConfigError, with the field's name, for indexers that cannot be built, and for shared
    choices without an indexer.
    """
    hf = config.hf_config
    if hf.index_head_dim < hf.qk_rope_head_dim:
        raise ConfigError(
            f"index_head_dim: {hf.index_head_dim} channels are fewer than the "
            f"{hf.qk_rope_head_dim} that rotate (qk_rope_head_dim)",
            param="index_head_dim",
        )
    if getattr(hf, "q_lora_rank", None) is None:
        raise ConfigError(
            "q_lora_rank: an indexer needs it: its queries are made from that narrower vector",
            param="q_lora_rank",
        )
    kinds = getattr(hf, "indexer_types", None)
    if kinds is None:
        return
    if len(kinds) < config.num_layers or not set(kinds) <= set(KINDS) or kinds[0] != "full":
        raise ConfigError(
            f"indexer_types: must name {' or '.join(KINDS)} for each of the {config.num_layers} "
            f"layers, the first one full, got {kinds!r}",
            param="indexer_types",
        )


class HeadWeights(nn.Module):
    """An indexer's weight of each head: float32 and never quantized, as rounding would change the
    choice.
    """

    def __init__(self, hidden_size: int, num_heads: int, build: BuildContext) -> None:
        super().__init__()
        self.operations = build.operations
        wide = dataclasses.replace(build, dtype=torch.float32)
        self.weight = nn.Parameter(wide.empty(num_heads, hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operations.linear(x.float(), self.weight)


CHOSEN = "chosen tokens"
"""In `ForwardContext.shared`: the last choice, None for all tokens."""


class Indexer(nn.Module):
    """Chooses the tokens that each query of a layer reads. Not sharded: every rank chooses the
    same.
    """

    def __init__(self, config: ModelConfig, build: BuildContext, *, interleaved: bool) -> None:
        """`interleaved`: rotate pairs of neighbours, otherwise halves."""
        super().__init__()
        hf = config.hf_config
        self.num_heads, self.interleaved = hf.index_n_heads, interleaved
        size = hf.index_head_dim
        self.scale = (size * self.num_heads) ** -0.5
        self.wq_b = Linear(hf.q_lora_rank, self.num_heads * size, build)
        self.wk = Linear(hf.hidden_size, size, build)
        self.k_norm = LayerNorm(size, 1e-6, build)
        self.weights_proj = HeadWeights(hf.hidden_size, self.num_heads, build)

    def forward(
        self,
        x: torch.Tensor,
        narrow: torch.Tensor,
        norm: RMSNorm,
        rotary: Rotary,
        context: ForwardContext,
        attention: LatentAttention,
    ) -> ChosenTokens | None:
        """Cache the step's index keys; return the tokens that its queries read, None for all.

        x: [num_tokens, hidden_size], normed; narrow: [num_tokens, q_lora_rank], the queries' input
        before `norm`; attention: the layer's, which has the cache.
        """
        query = weights = None
        if not attention.reads_all(context):
            query = self.wq_b(narrow, norm=norm).unflatten(1, (self.num_heads, -1))
            weights = self.weights_proj(x).mul_(self.scale)
        return attention.choose(
            query, self.wk(x), weights, context, norm=self.k_norm, rotary=rotary,
            interleaved=self.interleaved,
        )  # fmt: skip


class IndexedSelfAttention(LatentSelfAttention):
    index_interleaved: ClassVar[bool] = False
    """Default of `indexer_rope_interleave`."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        self.indexer: Indexer | None = None
        if chooses(config) and has_indexer(config.hf_config, layer):
            own = getattr(config.hf_config, "indexer_rope_interleave", None)
            interleaved = self.index_interleaved if own is None else bool(own)
            self.indexer = Indexer(config, build, interleaved=interleaved)

    @staticmethod
    def index_sizes(config: ModelConfig, layer: int) -> tuple[int | None, int | None]:
        hf = config.hf_config
        if not chooses(config):
            return None, None
        return hf.index_topk, hf.index_head_dim if has_indexer(hf, layer) else None

    def inner(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Reads what the last indexer has chosen, its own included."""
        if self.indexer is None or norm is None:
            x, before = hidden, norm
        else:
            x, before = norm(hidden), None
        query, latent = self.down_proj(x, norm=before).tensor_split((self.query_dim,), dim=-1)
        if self.indexer is not None:
            assert rotary is not None, "all layers rotate"
            context.shared[CHOSEN] = self.indexer(
                x, query, self.q_a_layernorm, rotary, context, self.latent_attention
            )
        return self.attend(query, latent, rotary, context, context.shared.get(CHOSEN))


class IndexedBlock(Block):
    """The last one is computed whole, for all tokens."""

    divides = False


class IndexedDecoder(LatentDecoder):
    """Layers share choices; stages do not: each has to begin with an indexer."""

    block = IndexedBlock

    def __init__(self, parts: BlockParts) -> None:
        """Raises ConfigError, also if a stage would begin with a shared choice."""
        super().__init__(parts)
        if chooses(parts.config):
            check_stages(parts.config, parts.build.ranks.pipeline)

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        check_indexers(config)
        return LatentDecoder.rotaries_of(config, build)


def check_stages(config: ModelConfig, pipeline: Pipeline) -> None:
    hf, count = config.hf_config, config.num_layers
    for stage in range(pipeline.size):
        first = dataclasses.replace(pipeline, stage=stage).layers(count).start
        if not has_indexer(hf, first):
            full = ", ".join(str(layer) for layer in range(count) if has_indexer(hf, layer))
            raise ConfigError(
                f"pipeline_layer_partition: stage {stage} would begin with layer {first}, which "
                f"shares what an earlier layer's indexer chooses; let each begin with one of the "
                f"layers {full}, or set max_model_len to at most index_topk {hf.index_topk}",
                param="pipeline_layer_partition",
            )

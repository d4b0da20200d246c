"""T5, Flan-T5, mT5 and UMT5: no positions, but learned score biases by distance."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import msgspec
import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.json_file import read_object
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard, WeightMap
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, EncodeContext, ForwardContext
from ...core.nn.embedding import Embedding
from ...core.nn.encoder import BidirectionalAttention, SourceAttention
from ...core.nn.linear import Linear
from ...core.nn.mlp import GatedMLP, PlainMLP
from ...core.nn.norm import RMSNorm
from ...core.protocols.attention import AttentionSpec
from .decoder import head_of
from .encoder_decoder import AttentionPart, EncoderDecoderLM

FEATURE = "bidirectional_attention.distance_bias"


class DistanceBias(nn.Module):
    """A bias for each head and logarithmic bucket of distances.

    weight: [num_buckets, num_heads]. Source: T5 (arXiv 1910.10683), and its code for the buckets.
    """

    def __init__(self, hf: Any, own: slice, build: BuildContext, *, causal: bool) -> None:
        """own: this rank's heads; causal: no distances to later keys."""
        super().__init__()
        self.own, self.causal = own, causal
        self.most = hf.relative_attention_max_distance
        """Larger distances share the last bucket."""
        self.weight = nn.Parameter(build.empty(hf.relative_attention_num_buckets, hf.num_heads))
        self.table: torch.Tensor
        distances = self.most + 1 if causal else 2 * self.most + 1
        self.register_buffer(
            "table", build.empty(own.stop - own.start, distances), persistent=False
        )

    def after_loading(self) -> None:
        """Expand the buckets to a table [num_heads, num_distances]."""
        first = 0 if self.causal else -self.most
        distances = torch.arange(first, self.most + 1)
        # Buckets count the distance to a key before; a table of both counts to one after.
        buckets = self._buckets(distances if self.causal else -distances)
        rows = self.weight.detach()[buckets.to(self.weight.device)]
        self.table.copy_(rows.t()[self.own])

    def _buckets(self, distance: torch.Tensor) -> torch.Tensor:
        """distance: [any] int, from query to key → [any] int64"""
        count, start = len(self.weight), torch.zeros_like(distance)
        if not self.causal:
            count //= 2
            start = (distance < 0).long() * count
            distance = distance.abs()
        exact = count // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.most / exact)
        large = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
        return start + torch.where(distance < exact, distance, large)


class T5Attention(AttentionPart):
    """Attention without biases of projections, and with unscaled scores."""

    bias: ClassVar[bool] = False

    def __init__(self, hf: Any, build: BuildContext) -> None:
        super().__init__(hf.d_model, hf.num_heads, build, hf.d_kv)

    def spec(self) -> AttentionSpec:
        return msgspec.structs.replace(super().spec(), scale=1.0)


class SelfAttention(T5Attention):
    """Attention to the layer's own tokens, with the bias, which layers may share."""

    def __init__(
        self, hf: Any, build: BuildContext, shared: DistanceBias | None, *, causal: bool
    ) -> None:
        super().__init__(hf, build)
        self.qkv_proj = self.merged(hf.d_model, "qkv", build)
        self.relative_attention_bias = shared or DistanceBias(
            hf, self.own.queries, build, causal=causal
        )


class EncoderSelfAttention(SelfAttention):
    def __init__(self, hf: Any, build: BuildContext, shared: DistanceBias | None) -> None:
        super().__init__(hf, build, shared, causal=False)
        heads = self.own.num_heads
        self.attention = BidirectionalAttention(heads, self.head_dim, build, scale=1.0)

    def forward(
        self, hidden: torch.Tensor, norm: nn.Module, context: EncodeContext
    ) -> torch.Tensor:
        qkv, bias = self.qkv_proj(hidden, norm=norm), self.relative_attention_bias.table
        return self.project(hidden, self.attention(qkv, context.rows, distance_bias=bias))


class DecoderSelfAttention(SelfAttention):
    def __init__(self, hf: Any, build: BuildContext, shared: DistanceBias | None) -> None:
        super().__init__(hf, build, shared, causal=True)
        spec = msgspec.structs.replace(self.spec(), distance_bias=True)
        self.attention = Attention(spec, build)

    def forward(
        self, hidden: torch.Tensor, norm: nn.Module, context: ForwardContext
    ) -> torch.Tensor:
        qkv, bias = self.qkv_proj(hidden, norm=norm), self.relative_attention_bias.table
        return self.project(hidden, self.attention(qkv, context, distance_bias=bias))


class CrossAttention(T5Attention):
    def __init__(self, hf: Any, build: BuildContext) -> None:
        super().__init__(hf, build)
        self.query = Linear(hf.d_model, self.inner_size, build, shard="out", share=self.rows["q"])
        self.kv_proj = self.merged(hf.d_model, "kv", build)
        self.attention = SourceAttention(self.spec(), build)

    def write(self, states: torch.Tensor, context: EncodeContext) -> None:
        self.attention.write(self.kv_proj(states), context)

    def forward(
        self, hidden: torch.Tensor, norm: nn.Module, context: ForwardContext
    ) -> torch.Tensor:
        return self.project(hidden, self.attention(self.query(hidden, norm=norm), context))


def _mlp(hf: Any, build: BuildContext) -> nn.Module:
    kind, _, gated = hf.feed_forward_proj.rpartition("-")
    if kind == "gated":
        name = "gelu_pytorch_tanh" if gated in ("gelu", "gelu_new") else gated
        return GatedMLP(hf.d_model, hf.d_ff, name, build, field="feed_forward_proj")
    return PlainMLP(
        hf.d_model, hf.d_ff, hf.feed_forward_proj, build, bias=False, field="feed_forward_proj"
    )


class Layer(nn.Module):
    """Attention, a decoder's cross attention, and the MLP, each after a norm."""

    def __init__(
        self, hf: Any, build: BuildContext, shared: DistanceBias | None, *, decodes: bool
    ) -> None:
        super().__init__()
        kind = DecoderSelfAttention if decodes else EncoderSelfAttention
        self.self_attn = kind(hf, build, shared)
        self.encoder_attn = CrossAttention(hf, build) if decodes else None
        self.mlp = _mlp(hf, build)
        count = 3 if decodes else 2
        self.norms = nn.ModuleList(
            RMSNorm(hf.d_model, hf.layer_norm_epsilon, build) for _ in range(count)
        )

    def forward(self, hidden: torch.Tensor, context: Any) -> torch.Tensor:
        hidden = self.self_attn(hidden, self.norms[0], context)
        if self.encoder_attn is not None:
            hidden = self.encoder_attn(hidden, self.norms[1], context)
        out: torch.Tensor = self.mlp(hidden, self.norms[-1])
        return out


class Half(nn.Module):
    def __init__(
        self, hf: Any, layers: int, build: BuildContext, *, decodes: bool, shares_bias: bool
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        shared: DistanceBias | None = None
        for _ in range(layers):
            layer = Layer(hf, build, shared, decodes=decodes)
            self.layers.append(layer)
            if shares_bias:
                shared = layer.self_attn.relative_attention_bias
        self.norm = RMSNorm(hf.d_model, hf.layer_norm_epsilon, build)

    def forward(self, hidden: torch.Tensor, context: Any) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, context)
        return hidden


class T5ForConditionalGeneration(EncoderDecoderLM):
    """T5 and Flan-T5: all layers share one bias."""

    shares_bias: ClassVar[bool] = True
    weight_map = WeightMap(
        stacked={
            "q": Shard("qkv_proj", "q"), "k": Shard("qkv_proj", "k"), "v": Shard("qkv_proj", "v"),
            "source_k": Shard("kv_proj", "k"), "source_v": Shard("kv_proj", "v"),
            "wi_0": Shard("gate_up_proj", "gate"), "wi_1": Shard("gate_up_proj", "up"),
        },
        prefixes={"encoder.embed_tokens.": "shared.", "decoder.embed_tokens.": "shared."},
        parts={
            "block": "layers", "layer.0.SelfAttention": "self_attn",
            "layer.1.EncDecAttention.q": "encoder_attn.query",
            "layer.1.EncDecAttention.k": "encoder_attn.source_k",
            "layer.1.EncDecAttention.v": "encoder_attn.source_v",
            "layer.1.EncDecAttention": "encoder_attn",
            "layer.1.DenseReluDense": "mlp", "layer.2.DenseReluDense": "mlp",
            "layer.0.layer_norm": "norms.0", "layer.1.layer_norm": "norms.1",
            "layer.2.layer_norm": "norms.2", "final_layer_norm": "norm",
        },
        names={"out_proj": "o", "up_proj": "wi", "down_proj": "wo"},
        tied={"lm_head.weight": "shared.weight"},
        # Of T5's first checkpoints, which it does not use.
        ignored=("decoder.layers.0.encoder_attn.relative_attention_bias.",),
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        nn.Module.__init__(self)
        hf: Any = config.hf_config
        if FEATURE not in build.operations.features:
            raise ConfigError(
                f"operations: {build.operations.name!r} do not support {FEATURE}",
                param="operations",
            )
        self.shared = Embedding(hf.vocab_size, hf.d_model, build, shard="vocabulary")
        self.encoder = Half(hf, hf.num_layers, build, decodes=False, shares_bias=self.shares_bias)
        self.decoder = Half(
            hf, hf.num_decoder_layers, build, decodes=True, shares_bias=self.shares_bias
        )
        # Later versions of transformers call the embeddings of all of them tied.
        tied = bool(read_object(config.path / "config.json").get("tie_word_embeddings", True))
        self.scale = hf.d_model**-0.5 if self.scales(hf, tied) else 1.0
        if self.has_head(hf, tied) or not hf.tie_word_embeddings:
            self.lm_head = Embedding(hf.vocab_size, hf.d_model, build, shard="vocabulary")

    @classmethod
    def scales(cls, hf: Any, tied: bool) -> bool:
        """Return whether logits are scaled, as in the first T5. tied: config.json's
        `tie_word_embeddings`.
        """
        return bool(getattr(hf, "scale_decoder_outputs", tied))

    @classmethod
    def has_head(cls, hf: Any, tied: bool) -> bool:
        """Return whether the head is separate from the embeddings."""
        return not cls.scales(hf, tied)

    def encode(self, token_ids: torch.Tensor, context: EncodeContext) -> None:
        states = self.encoder.norm(self.encoder(self.shared(token_ids), context))
        for layer in self.decoder.layers:
            layer.encoder_attn.write(states, context)  # type: ignore[union-attr, operator]

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden: torch.Tensor = self.decoder(self.shared(input_ids), context)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return head_of(self, self.shared).logits(hidden, norm=self.decoder.norm, factor=self.scale)


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    @classmethod
    def scales(cls, hf: Any, tied: bool) -> bool:
        return False

    @classmethod
    def has_head(cls, hf: Any, tied: bool) -> bool:
        return not tied


class UMT5ForConditionalGeneration(T5ForConditionalGeneration):
    """Each layer has a bias of its own."""

    shares_bias = False

    @classmethod
    def scales(cls, hf: Any, tied: bool) -> bool:
        return tied

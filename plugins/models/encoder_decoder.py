"""Common parts of encoder-decoder models: an encoder in both directions, and a decoder whose blocks
also attend to the encoder's states. Families of BART's kind set a few attributes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard, WeightMap
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, EncodeContext, ForwardContext
from ...core.nn.embedding import Embedding
from ...core.nn.encoder import BidirectionalAttention, SourceAttention
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.mlp import PlainMLP
from ...core.nn.norm import LayerNorm
from ...core.parallel.sharding import HeadShare
from ...core.protocols.attention import AttentionSpec
from .decoder import QKV_SHARDS

EPS = 1e-5
"""Eps of all layer norms; configurations do not state it."""


class Layer(nn.Module):
    """Attention and MLP, each added to the stream: after a norm of its input, or before one of the
    sum (`norm_first` False)."""

    def __init__(self, size: int, build: BuildContext, *, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.self_attn_layer_norm = LayerNorm(size, EPS, build)
        self.final_layer_norm = LayerNorm(size, EPS, build)

    def add(
        self, hidden: torch.Tensor, part: nn.Module, norm: nn.Module, *context: Any
    ) -> torch.Tensor:
        if self.norm_first:
            out: torch.Tensor = part(hidden, norm, *context)
            return out
        out = norm(part(hidden, None, *context))
        return out


class AttentionPart(nn.Module):
    """Common to each kind of attention: this rank's heads, and their output projection."""

    bias: ClassVar[bool] = True

    def __init__(
        self, size: int, heads: int, build: BuildContext, head_dim: int | None = None
    ) -> None:
        """head_dim: None: size / heads"""
        super().__init__()
        self.ranks, self.head_dim = build.ranks, head_dim or size // heads
        self.inner_size = heads * self.head_dim
        self.own = HeadShare.of(heads, heads, build.ranks.tensor)
        self.rows = self.own.rows(self.head_dim)
        self.out_proj = Linear(
            self.inner_size, size, build, bias=self.bias, shard="in", share=self.rows["q"]
        )

    def spec(self) -> AttentionSpec:
        own = self.own
        return AttentionSpec(
            num_heads=own.num_heads, num_kv_heads=own.num_kv_heads, head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
        )  # fmt: skip

    def merged(self, size: int, names: Sequence[str], build: BuildContext) -> MergedLinear:
        """Return merged projections to the heads named in `names`: q, k, v."""
        shares = {name: self.rows[name] for name in names}
        sizes = dict.fromkeys(names, self.inner_size)
        return MergedLinear(size, sizes, build, bias=self.bias, shard="out", shares=shares)

    def project(self, hidden: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """hidden + output of `heads`, [num_tokens, num_heads * head_dim]"""
        return self.ranks.add(hidden, (self.out_proj, heads))


class EncoderAttention(AttentionPart):
    """hidden + attention(norm(hidden)) in both directions."""

    def __init__(self, size: int, heads: int, build: BuildContext) -> None:
        super().__init__(size, heads, build)
        self.qkv_proj = self.merged(size, "qkv", build)
        self.attention = BidirectionalAttention(self.own.num_heads, self.head_dim, build)

    def forward(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: EncodeContext
    ) -> torch.Tensor:
        heads = self.attention(self.qkv_proj(hidden, norm=norm), context.rows)
        return self.project(hidden, heads)


class DecoderAttention(AttentionPart):
    """hidden + attention(norm(hidden)) to the tokens before."""

    def __init__(self, size: int, heads: int, build: BuildContext) -> None:
        super().__init__(size, heads, build)
        self.qkv_proj = self.merged(size, "qkv", build)
        self.attention = Attention(self.spec(), build)

    def forward(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: ForwardContext
    ) -> torch.Tensor:
        return self.project(hidden, self.attention(self.qkv_proj(hidden, norm=norm), context))


class CrossAttention(AttentionPart):
    """hidden + attention(norm(hidden)) to the encoder's states."""

    def __init__(self, size: int, heads: int, build: BuildContext) -> None:
        super().__init__(size, heads, build)
        self.query = Linear(size, size, build, bias=True, shard="out", share=self.rows["q"])
        self.kv_proj = self.merged(size, "kv", build)
        self.attention = SourceAttention(self.spec(), build)

    def write(self, states: torch.Tensor, context: EncodeContext) -> None:
        """Keep the keys and values of sources, [num_source_tokens, hidden_size]."""
        self.attention.write(self.kv_proj(states), context)

    def forward(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: ForwardContext
    ) -> torch.Tensor:
        return self.project(hidden, self.attention(self.query(hidden, norm=norm), context))


class EncoderLayer(Layer):
    def __init__(self, hf: Any, build: BuildContext, *, norm_first: bool) -> None:
        super().__init__(hf.d_model, build, norm_first=norm_first)
        self.self_attn = EncoderAttention(hf.d_model, hf.encoder_attention_heads, build)
        self.mlp = _mlp(hf, hf.encoder_ffn_dim, build)

    def forward(self, hidden: torch.Tensor, context: EncodeContext) -> torch.Tensor:
        hidden = self.add(hidden, self.self_attn, self.self_attn_layer_norm, context)
        return self.add(hidden, self.mlp, self.final_layer_norm)


class DecoderLayer(Layer):
    def __init__(self, hf: Any, build: BuildContext, *, norm_first: bool) -> None:
        super().__init__(hf.d_model, build, norm_first=norm_first)
        heads = hf.decoder_attention_heads
        self.self_attn = DecoderAttention(hf.d_model, heads, build)
        self.encoder_attn = CrossAttention(hf.d_model, heads, build)
        self.encoder_attn_layer_norm = LayerNorm(hf.d_model, EPS, build)
        self.mlp = _mlp(hf, hf.decoder_ffn_dim, build)

    def forward(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden = self.add(hidden, self.self_attn, self.self_attn_layer_norm, context)
        hidden = self.add(hidden, self.encoder_attn, self.encoder_attn_layer_norm, context)
        return self.add(hidden, self.mlp, self.final_layer_norm)


def _mlp(hf: Any, inner: int, build: BuildContext) -> PlainMLP:
    return PlainMLP(hf.d_model, inner, hf.activation_function, build, field="activation_function")


class LearnedPositions(nn.Module):
    offset: ClassVar[int] = 0
    length: ClassVar[str] = "max_position_embeddings"
    """The configuration's field."""

    def __init__(self, hf: Any, build: BuildContext) -> None:
        super().__init__()
        self.operations = build.operations
        rows = getattr(hf, self.length) + self.offset
        self.weight = nn.Parameter(build.empty(rows, hf.d_model))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self.operations.embed(positions, self.weight[self.offset :])


class LearnedFromTwo(LearnedPositions):
    """Learned positions whose first two rows are for padding."""

    offset = 2


class SinusoidalPositions(nn.Module):
    """Position → sines of all frequencies, then their cosines (arXiv 1706.03762). Computed even if
    the checkpoint has them.
    """

    offset: ClassVar[int] = 0

    def __init__(self, hf: Any, build: BuildContext) -> None:
        super().__init__()
        self.table: torch.Tensor
        positions = torch.arange(hf.max_position_embeddings, dtype=torch.float64) + self.offset
        angles = positions[:, None] * self.rates(hf.d_model)
        table = torch.cat((angles.sin(), angles.cos()), dim=-1).to(build.dtype)
        self.register_buffer("table", table.to(build.device), persistent=False)

    @staticmethod
    def rates(size: int) -> torch.Tensor:
        """→ [size / 2] radians per position"""
        exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
        out: torch.Tensor = 10000.0**-exponents
        return out

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self.table[positions]


class SinusoidalFromTwo(SinusoidalPositions):
    """Positions start at 2, and the last rate is exactly 1 / 10000."""

    offset = 2

    @staticmethod
    def rates(size: int) -> torch.Tensor:
        half = size // 2
        exponents = torch.arange(half, dtype=torch.float64) / (half - 1)
        out: torch.Tensor = 10000.0**-exponents
        return out


class Half(nn.Module):
    layer: ClassVar[type[EncoderLayer | DecoderLayer]]

    def __init__(self, owner: type[EncoderDecoderLM], hf: Any, layers: int, build: BuildContext):
        super().__init__()
        self.scale = math.sqrt(hf.d_model) if hf.scale_embedding else None
        self.embed_positions = owner.positions(hf, build)
        self.norms_words = owner.decoder_norms_words and isinstance(self, Decoder)
        self.layernorm_embedding = None
        if owner.norms_embeddings:
            self.layernorm_embedding = LayerNorm(hf.d_model, EPS, build)
        self.layers = nn.ModuleList(
            self.layer(hf, build, norm_first=owner.norm_first) for _ in range(layers)
        )
        self.layer_norm = LayerNorm(hf.d_model, EPS, build) if owner.norm_first else None

    def forward(
        self, embeddings: torch.Tensor, context: EncodeContext | ForwardContext
    ) -> torch.Tensor:
        """Embeddings of tokens → states before the last norm, both [num_tokens, hidden_size]."""
        hidden = embeddings if self.scale is None else embeddings * self.scale
        hidden = self.add_positions(hidden, self.embed_positions(context.positions))
        for layer in self.layers:
            hidden = layer(hidden, context)
        out: torch.Tensor = hidden
        return out

    def add_positions(self, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Both [num_tokens, hidden_size] → input of the first layer"""
        norm = self.layernorm_embedding
        if norm is not None and self.norms_words:
            words = norm(words)
        hidden = words + positions
        if norm is None or self.norms_words:
            return hidden
        out: torch.Tensor = norm(hidden)
        return out

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the last norm, if any."""
        if self.layer_norm is None:
            return hidden
        out: torch.Tensor = self.layer_norm(hidden)
        return out


class Encoder(Half):
    layer = EncoderLayer


class Decoder(Half):
    layer = DecoderLayer


class EncoderDecoder(nn.Module):
    encoder_class: ClassVar[type[Encoder]] = Encoder

    def __init__(self, owner: type[EncoderDecoderLM], hf: Any, build: BuildContext) -> None:
        super().__init__()
        self.shared = Embedding(hf.vocab_size, hf.d_model, build, bias=True, shard="vocabulary")
        """Its bias is the logits' bias."""
        self.encoder = self.encoder_class(owner, hf, hf.encoder_layers, build)
        self.decoder = Decoder(owner, hf, hf.decoder_layers, build)


class LogitsBiasMap(WeightMap):
    """For checkpoints with the logits' bias as [1, vocab_size]."""

    def pieces(self, name: str, tensor: torch.Tensor) -> Any:
        bias = name.endswith("final_logits_bias")
        yield from super().pieces(name, tensor.flatten() if bias else tensor)


class EncoderDecoderLM(nn.Module):
    """An encoder-decoder model of BART's kind. Families set the attributes."""

    tensor_parallel: ClassVar[bool] = True
    norm_first: ClassVar[bool] = False
    """Norms precede attention and MLP, with one after all layers; otherwise they follow each
    sum."""
    norms_embeddings: ClassVar[bool] = True
    """Whether the sum of words and positions is normed."""
    decoder_norms_words: ClassVar[bool] = False
    """Whether the decoder norms words before positions are added."""
    positions: ClassVar[type[LearnedPositions | SinusoidalPositions]] = LearnedFromTwo
    model_class: ClassVar[type[EncoderDecoder]] = EncoderDecoder
    weight_map: WeightMap = LogitsBiasMap(
        stacked={
            **QKV_SHARDS, "source_k": Shard("kv_proj", "k"), "source_v": Shard("kv_proj", "v"),
        },
        prefixes={
            "final_logits_bias": "model.shared.bias",
            "lm_head.": "model.shared.",
            **{
                f"{start}{half}.embed_tokens.": "model.shared."
                for start in ("model.", "") for half in ("encoder", "decoder")
            },
            **{f"{part}.": f"model.{part}." for part in ("shared", "encoder", "decoder")},
        },
        parts={
            "encoder_attn.q_proj": "encoder_attn.query",
            "encoder_attn.k_proj": "encoder_attn.source_k",
            "encoder_attn.v_proj": "encoder_attn.source_v",
        },
        names={"mlp.up_proj": "fc1", "mlp.down_proj": "fc2"},
        zeros=("model.shared.bias",),
        ignored=("model.encoder.embed_positions.", "model.decoder.embed_positions."),
    )  # fmt: skip
    """All names of embeddings refer to one table."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf: Any = config.hf_config
        self.check(hf)
        self.model = self.model_class(type(self), hf, build)

    @classmethod
    def check(cls, hf: Any) -> None:
        """Raise ConfigError for an unsupported variant."""
        if not hf.tie_word_embeddings:
            raise ConfigError(
                "tie_word_embeddings: False is not supported for encoder-decoder models",
                param="tie_word_embeddings",
            )
        for half in ("encoder", "decoder"):
            heads = getattr(hf, f"{half}_attention_heads")
            if hf.d_model % heads:
                raise ConfigError(
                    f"{half}_attention_heads: {heads} does not divide d_model {hf.d_model}",
                    param=f"{half}_attention_heads",
                )

    def encode(self, source: torch.Tensor, context: EncodeContext) -> None:
        """Encode sources, and keep their keys and values."""
        encoder = self.model.encoder
        states = encoder.normed(encoder(self.read(source), context))
        for layer in self.model.decoder.layers:
            layer.encoder_attn.write(states, context)  # type: ignore[union-attr, operator]

    def read(self, source: torch.Tensor) -> torch.Tensor:
        """[num_source_tokens] → embeddings, [num_source_tokens, hidden_size]"""
        out: torch.Tensor = self.model.shared(source)
        return out

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden: torch.Tensor = self.model.decoder(self.model.shared(input_ids), context)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.shared.logits(hidden, norm=self.model.decoder.layer_norm)

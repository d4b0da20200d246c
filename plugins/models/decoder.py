"""What Llama-like decoders share: embedding, blocks of attention and MLP, final norm, head.

A family is an attention class (how queries, keys and values come about), what stands in the MLP's
place, and a few words of configuration; this file knows no family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard, WeightMap
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.embedding import Embedding
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.mlp import GatedMLP, PlainMLP
from ...core.nn.norm import LayerNorm, RMSNorm, norm_eps
from ...core.nn.rotary import Rotary
from ...core.protocols import AttentionSpec
from ...core.text.tokenizer import Tokenizer


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions. Families override the small methods."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        sizes = {
            "q": self.num_heads * self.head_dim,
            "k": self.num_kv_heads * self.head_dim,
            "v": self.num_kv_heads * self.head_dim,
        }
        self.qkv_proj = self.projection(hf, sizes, build)
        self.o_proj = Linear(sizes["q"], hf.hidden_size, build, bias=self.output_bias(hf))
        self.attention = Attention(self.spec(hf, layer), build)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.sinks: nn.Parameter | None = None

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        """What this layer asks of the backend."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window(hf, layer),
        )

    def projection(self, hf: Any, sizes: dict[str, int], build: BuildContext) -> Linear:
        """Queries, keys and values, of `sizes`, as the checkpoint has them: three tensors."""
        return MergedLinear(hf.hidden_size, sizes, build, bias=self.qkv_bias(hf))

    @staticmethod
    def qkv_bias(hf: object) -> bool:
        return bool(getattr(hf, "attention_bias", False))

    @staticmethod
    def output_bias(hf: object) -> bool:
        return bool(getattr(hf, "attention_bias", False))

    @staticmethod
    def sliding_window(hf: object, layer: int) -> int | None:
        return None

    def forward(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary,
        context: ForwardContext,
        *,
        add: bool = True,
    ) -> torch.Tensor:
        """hidden + attention(norm(hidden)), or with `add` False the second term alone:
        [num_tokens, hidden_size] → the same shape."""
        heads = self.inner(hidden, norm, rotary, context)
        out: torch.Tensor = self.o_proj(heads, residual=hidden if add else None)
        return out

    def inner(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary,
        context: ForwardContext,
    ) -> torch.Tensor:
        """What all heads found in norm(hidden): [num_tokens, hidden_size] → [num_tokens,
        num_heads * head_dim]"""
        return self.heads(self.qkv_proj(hidden, norm=norm), rotary, context)

    def heads(self, qkv: torch.Tensor, rotary: Rotary, context: ForwardContext) -> torch.Tensor:
        """What all heads found: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], may be
        overwritten → [num_tokens, num_heads * head_dim]"""
        out: torch.Tensor = self.attention(
            qkv, context, rotary=rotary, query_norm=self.q_norm, key_norm=self.k_norm,
            sinks=self.sinks,
        )  # fmt: skip
        return out


MakeMLP: TypeAlias = Callable[[ModelConfig, int, BuildContext], nn.Module]
"""(configuration, layer, build) → a module whose forward(hidden, norm) adds to the stream."""


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    norm: ClassVar[type[RMSNorm | LayerNorm]] = RMSNorm
    """Of the block's norms, and of the decoder's last one. Made with the configuration's eps."""
    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    """What checkpoints call a block's norms."""
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        build: BuildContext,
        attention: type[SelfAttention],
        mlp: MakeMLP,
    ) -> None:
        super().__init__()
        hf = config.hf_config
        for name in filter(None, self.norms):
            setattr(self, name, self.norm(hf.hidden_size, norm_eps(hf, self.norm), build))
        self.self_attn = attention(config, layer, build)
        self.mlp = mlp(config, layer, build)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape; `hidden` may be overwritten."""
        hidden = self.self_attn(hidden, self.input_layernorm, rotary, context)
        out: torch.Tensor = self.mlp(hidden, self.post_attention_layernorm)
        return out


class NormedBlock(Block):
    """hidden + norm(answer of norm(hidden)), of attention and of the MLP.

    `norms`: before and behind attention, before and behind the MLP; "" for none.
    """

    mlp: GatedMLP

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape; `hidden` may be overwritten."""
        norms: list[Any] = [getattr(self, name, None) for name in self.norms]
        before, behind, before_mlp, behind_mlp = norms
        answer = self.self_attn(hidden, before, rotary, context, add=False)
        hidden = behind.add(answer, hidden)
        answer = self.mlp.down_proj(self.mlp.inner(hidden, before_mlp))
        out: torch.Tensor = behind_mlp.add(answer, hidden)
        return out


class ParallelBlock(Block):
    """hidden + attention(norm(hidden)) + mlp(norm(hidden)), of the same stream.

    `norms`: one for both, or one for attention and one for the MLP.
    """

    norms = ("input_layernorm",)
    mlp: GatedMLP | PlainMLP

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape; `hidden` may be overwritten."""
        normed = [getattr(self, name)(hidden) for name in self.norms]
        heads = self.self_attn.inner(normed[0], None, rotary, context)
        inner = self.mlp.inner(normed[-1])
        hidden = self.self_attn.o_proj(heads, residual=hidden)
        out: torch.Tensor = self.mlp.down_proj(inner, residual=hidden)
        return out


class Decoder(nn.Module):
    """Everything between token ids and the last norm. A family may have blocks of its own."""

    block: ClassVar[type[Block]] = Block

    def __init__(
        self,
        config: ModelConfig,
        build: BuildContext,
        attention: type[SelfAttention],
        mlp: MakeMLP,
    ) -> None:
        super().__init__()
        hf = config.hf_config
        self.embed_tokens = Embedding(config.vocab_size, hf.hidden_size, build)
        self.scale = self.embedding_scale(config, build)
        self.rotaries = nn.ModuleList(self.rotaries_of(config, build))
        block = self.block_of(config)
        self.layers = nn.ModuleList(
            block(config, layer, build, attention, mlp) for layer in range(hf.num_hidden_layers)
        )
        norm = block.norm
        self.norm = norm(hf.hidden_size, norm_eps(hf, norm), build)

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] → [num_tokens, hidden_size], not normed."""
        hidden = self.embed(input_ids)
        for layer, rotary in zip(self.layers, self.rotaries, strict=True):
            hidden = layer(hidden, rotary, context)
        return hidden

    @classmethod
    def block_of(cls, config: ModelConfig) -> type[Block]:
        """For families whose configuration says which blocks there are."""
        return cls.block

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> list[Rotary]:
        """One for each layer: by default all layers' is the same."""
        return [Rotary(config, build)] * config.num_layers

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] → what the first layer gets, [num_tokens, hidden_size]."""
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        return hidden if self.scale is None else hidden * self.scale

    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float | None:
        """What embeddings are multiplied by; None: nothing."""
        return None


def rotaries_by_type(config: ModelConfig, build: BuildContext) -> list[Rotary]:
    """`Decoder.rotaries_of` where the configuration has rope parameters for each layer type."""
    hf = config.hf_config
    kinds = sorted(set(hf.layer_types))
    made = {kind: Rotary(config, build, hf.rope_parameters[kind]) for kind in kinds}
    return [made[kind] for kind in hf.layer_types]


QKV_SHARDS = {
    "q_proj": Shard("qkv_proj", "q"),
    "k_proj": Shard("qkv_proj", "k"),
    "v_proj": Shard("qkv_proj", "v"),
}
"""Where checkpoints have queries, keys and values as three tensors."""


class HeadlessLM(nn.Module):
    """A decoder whose states are pooled. A family sets `attention`, and may set `decoder` and
    override `mlp`.

    Checkpoints of embedding models often leave out the `model.` that others begin names with.
    """

    attention: ClassVar[type[SelfAttention]] = SelfAttention
    decoder: ClassVar[type[Decoder]] = Decoder
    weight_map: ClassVar[WeightMap] = WeightMap(
        stacked={
            **QKV_SHARDS,
            "gate_proj": Shard("gate_up_proj", "gate"),
            "up_proj": Shard("gate_up_proj", "up"),
        },
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={f"{part}.": f"model.{part}." for part in ("embed_tokens", "layers", "norm")},
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.model = self.decoder(config, build, self.attention, self.mlp)

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] → [num_tokens, hidden_size]"""
        hidden: torch.Tensor = self.model(input_ids, context)
        return hidden

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        """Makes what comes after a layer's attention: a `MakeMLP`."""
        hf = config.hf_config
        return GatedMLP(
            hf.hidden_size,
            hf.intermediate_size,
            hf.hidden_act,
            build,
            bias=bool(getattr(hf, "mlp_bias", False)),
        )

    def pooling_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last norm: [any, hidden_size] → the same shape."""
        out: torch.Tensor = self.model.norm(hidden)
        return out


class CausalLM(HeadlessLM):
    """A decoder and its head, which it goes without where it is pooled."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        if config.pooling is None and not config.hf_config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, build)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] → [num_rows, vocab_size]"""
        head: Embedding = getattr(self, "lm_head", self.model.embed_tokens)
        return head.logits(hidden, norm=self.model.norm)


class DecoderClassifier(HeadlessLM):
    """A decoder and a linear classifier of its last state, which may be made of rows of a head."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        assert config.pooling is not None, "a classifier is pooled"
        self.operations, self.folder = build.operations, config.path
        self.tokens = config.pooling.tokens
        self.rows: torch.Tensor | None = None
        """[num_labels, hidden_size], where the classifier is made of a head."""
        if self.tokens is None:
            self.score = Linear(config.hidden_size, len(config.pooling.labels), build)
        elif not config.hf_config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, build)

    def after_loading(self) -> None:
        """The head's rows of a few tokens become the classifier; the rest of it is given back."""
        if self.tokens is None:
            return
        head: Embedding = getattr(self, "lm_head", self.model.embed_tokens)
        rows = head.weight[self._token_ids(self.tokens.tokens)].float()
        rows = rows[1:] - rows[:1] if self.tokens.difference else rows
        self.rows = rows.to(head.weight.dtype)
        if hasattr(self, "lm_head"):
            del self.lm_head

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] → logits [num_rows, num_labels]"""
        if self.rows is not None:
            return self.operations.linear(pooled, self.rows)
        logits: torch.Tensor = self.score(pooled)
        return logits

    def _token_ids(self, tokens: Sequence[str]) -> list[int]:
        """Raises ConfigError for what is not one token: a wrong one would give silent nonsense."""
        tokenizer = Tokenizer.load(str(self.folder))
        found = []
        for token in tokens:
            ids = tokenizer.encode(token, add_special_tokens=False)
            if len(ids) != 1 or ids[0] == tokenizer.unknown_id:
                raise ConfigError(
                    f"hf_overrides: {token!r} of classifier_from_token is not one token of this "
                    f"model (ids {ids})",
                    param="hf_overrides",
                )
            found += ids
        return found

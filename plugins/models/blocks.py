"""Blocks of Llama-like decoders: attention and MLP after norms, one after the other or together.

What `Block` computes with Qwen3's attention and a `GatedMLP`, for x of [num_tokens, hidden_size]:

    y = input_layernorm(x)                      # x / rms(x) * weight
    q, k, v = split(qkv_proj(y))                # [num_tokens, heads, head_dim]; fewer k and v heads
    q, k = rope(q_norm(q)), rope(k_norm(k))     # norms over each head; rope turns by the position
    cache[slot_mapping] = k, v
    a = softmax(q @ cache.k.T * head_dim**-0.5) @ cache.v   # over tokens up to the query's own
    x = x + o_proj(a)

    y = post_attention_layernorm(x)
    gate, up = split(gate_up_proj(y))
    x = x + down_proj(silu(gate) * up)

The code divides this differently: products take the norm before them and the residual after them as
arguments (`Linear.forward`), and q_norm to a is one call (`Attention.forward`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.mlp import GatedMLP, PlainMLP
from ...core.nn.norm import LayerNorm, RMSNorm, norm_eps
from ...core.nn.rotary import Rotary
from ...core.parallel.sharding import HeadShare, Sharding
from ...core.protocols.attention import AttentionSpec
from .old_constructors import of_fields


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions. Families override the small methods."""

    fused: ClassVar[bool] = False
    """Queries, keys and values are one tensor of the checkpoint."""
    norm_last: ClassVar[bool] = False
    """`q_norm` and `k_norm` come after the rotation."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        num_heads, num_kv_heads = config.num_heads, self.kv_heads(config)
        self.ranks, self.head_dim = build.ranks, config.head_dim
        self.max_model_len = config.max_model_len
        self.all_heads = num_heads
        self.own = HeadShare.of(num_heads, num_kv_heads, build.ranks.tensor)
        """This rank's heads, of all."""
        self.num_heads, self.num_kv_heads = self.own.num_heads, self.own.num_kv_heads
        sizes = {
            "q": num_heads * self.head_dim,
            "k": num_kv_heads * self.head_dim,
            "v": num_kv_heads * self.head_dim,
        }
        self.qkv_proj = MergedLinear(
            hf.hidden_size, sizes, build, bias=self.qkv_bias(hf), shard="out",
            shares=self.own.rows(self.head_dim), whole=self.fused,
        )  # fmt: skip
        bias = self.output_bias(hf)
        self.o_proj = Linear(sizes["q"], hf.hidden_size, build, bias=bias, shard="in")
        self.attention = Attention(self.spec(hf, layer), build, norm_last=self.norm_last)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.sinks: nn.Parameter | None = None
        self.shardings: dict[str, Sharding] = {}

    @staticmethod
    def kv_heads(config: ModelConfig) -> int:
        """Return the number of key heads, where the configuration calls it otherwise."""
        return config.num_kv_heads

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        """Return what this layer requires of the backend."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window(hf, layer),
        )

    def add_sinks(self, build: BuildContext) -> None:
        """Create a sink for each head."""
        self.sinks = nn.Parameter(build.empty(self.num_heads))
        if build.ranks.tensor.size > 1:
            sharding = Sharding(0, {"": self.all_heads}, {"": (self.own.queries,)})
            self.shardings["sinks"] = sharding

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
        rotary: Rotary | None,
        context: ForwardContext,
        *,
        add: bool = True,
    ) -> torch.Tensor:
        """hidden + attention(norm(hidden)), or with `add` False the second term alone:
        [num_tokens, hidden_size] → the same shape."""
        heads = self.inner(hidden, norm, rotary, context)
        return self.project(heads, hidden if add else None)

    def project(self, heads: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """residual + output of `heads`, [num_tokens, num_heads * head_dim]: → [num_tokens,
        hidden_size]"""
        return self.ranks.add(residual, (self.o_proj, heads))

    def inner(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Attention output of all heads for norm(hidden): [num_tokens, hidden_size] → [num_tokens,
        num_heads * head_dim]"""
        return self.heads(self.qkv_proj(hidden, norm=norm), rotary, context)

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        """Attention output of all heads: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim],
        may be overwritten → [num_tokens, num_heads * head_dim]"""
        out: torch.Tensor = self.attention(
            qkv, context, rotary=rotary, query_norm=self.q_norm, key_norm=self.k_norm,
            sinks=self.sinks,
        )  # fmt: skip
        return out


MakeMLP: TypeAlias = Callable[[ModelConfig, int, BuildContext], nn.Module]
"""(configuration, layer, build) → a module whose forward(hidden, norm) adds to the residual
stream."""


class BlockParts(NamedTuple):
    """What a decoder's blocks are made from."""

    config: ModelConfig
    build: BuildContext
    attention: type[SelfAttention]
    mlp: MakeMLP

    def make_attention(self, layer: int) -> SelfAttention:
        """Create the attention of a layer."""
        return self.attention(self.config, layer, self.build)

    def make_mlp(self, layer: int) -> nn.Module:
        """Create what follows a layer's attention."""
        return self.mlp(self.config, layer, self.build)


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    norm: ClassVar[type[RMSNorm | LayerNorm]] = RMSNorm
    """Type of the block's norms and the decoder's last one. Created with the configuration's
    eps."""
    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    """Names of the block's norms in checkpoints."""
    divides: ClassVar[bool] = True
    """Whether `forward` does what `attend` and then `after_attention` do. Of a class with a
    `forward` of its own it is False unless the class says otherwise."""
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def __init_subclass__(cls) -> None:
        if "forward" in vars(cls) and "divides" not in vars(cls):
            cls.divides = False

    @of_fields(BlockParts, with_layer=True)
    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__()
        for name in filter(None, self.norms):
            setattr(self, name, self.make_norm(parts.config.hf_config, parts.build))
        self.self_attn = parts.make_attention(layer)
        self.mlp = parts.make_mlp(layer)

    def after_loading(self) -> None:
        """Tell attention which weights are read after it, and products which norms come before."""
        for norm, product in self.normed_products():
            if isinstance(product, Linear):
                product.expect(norm)
        attention = getattr(getattr(self, "self_attn", None), "attention", None)
        if isinstance(attention, Attention):
            weights = [getattr(product, "weight", None) for product in self.products_after()]
            attention.next_weights = tuple(
                weight for weight in weights
                if isinstance(weight, torch.Tensor) and weight.is_contiguous()
            )  # fmt: skip

    def normed_products(self) -> list[tuple[nn.Module | None, nn.Module | None]]:
        """Return norms, each with the product of what it norms."""
        return self._pairs("input_layernorm", "post_attention_layernorm")

    def _pairs(
        self, before_attention: str, before_mlp: str
    ) -> list[tuple[nn.Module | None, nn.Module | None]]:
        qkv = getattr(getattr(self, "self_attn", None), "qkv_proj", None)
        first, second = (getattr(self, name, None) for name in (before_attention, before_mlp))
        return [(first, qkv), (second, self._first_of_mlp())]

    def products_after(self) -> list[nn.Module | None]:
        """Return the first products after attention, in order."""
        return [getattr(self.self_attn, "o_proj", None), self._first_of_mlp()]

    def _first_of_mlp(self) -> nn.Module | None:
        mlp = getattr(self, "mlp", None)
        layers = (getattr(mlp, name, None) for name in ("gate_up_proj", "up_proj"))
        return next((layer for layer in layers if isinstance(layer, nn.Module)), None)

    @classmethod
    def make_norm(cls, hf: Any, build: BuildContext) -> nn.Module:
        """Create one of the block's norms, or the decoder's last one."""
        return cls.norm(hf.hidden_size, norm_eps(hf, cls.norm), build)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape; `hidden` may be overwritten."""
        return self._add_mlp(self.self_attn(hidden, self.input_layernorm, rotary, context))

    def attend(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        """Attention output of all heads: [num_tokens, hidden_size] → [num_tokens, num_heads *
        head_dim]"""
        norm = getattr(self, self.norms[0], None)
        return self.self_attn.inner(hidden, norm, rotary, context)

    def after_attention(self, hidden: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """Do what the block does with each token alone. hidden: the block's input, [num_rows,
        hidden_size], may be overwritten; heads: what `attend` returned → as hidden"""
        return self._add_mlp(self.self_attn.project(heads, hidden))

    def _add_mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(hidden, self.post_attention_layernorm)
        return out


class NormedBlock(Block):
    """hidden + norm(f(norm(hidden))), for attention and then for the MLP.

    `norms`: before and after attention, before and after the MLP; "" for none.
    """

    divides: ClassVar[bool] = True
    mlp: nn.Module

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape; `hidden` may be overwritten."""
        norm = getattr(self, self.norms[0], None)
        return self._add_both(hidden, self.self_attn(hidden, norm, rotary, context, add=False))

    def after_attention(self, hidden: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """As `Block`."""
        return self._add_both(hidden, self.self_attn.project(heads))

    def normed_products(self) -> list[tuple[nn.Module | None, nn.Module | None]]:
        """As `Block`."""
        return self._pairs(self.norms[0], self.norms[2])

    def _add_both(self, hidden: torch.Tensor, attn_output: torch.Tensor) -> torch.Tensor:
        """attn_output: not normed."""
        norms: list[Any] = [getattr(self, name, None) for name in self.norms]
        _, post_attn_norm, pre_mlp_norm, post_mlp_norm = norms
        hidden = post_attn_norm.add(attn_output, hidden)
        mlp_output = self.mlp(hidden, pre_mlp_norm, add=False)
        out: torch.Tensor = post_mlp_norm.add(mlp_output, hidden)
        return out


class ParallelBlock(Block):
    """hidden + attention(norm(hidden)) + mlp(norm(hidden)), of the same stream.

    `norms`: one for both, or one for attention and one for the MLP.
    """

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm",)
    divides: ClassVar[bool] = True
    mlp: GatedMLP | PlainMLP

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape; `hidden` may be overwritten."""
        norms = [getattr(self, name) for name in self.norms]
        # Products of one token apply norms themselves, but for quantized weights.
        if hidden.shape[0] == 1 and isinstance(self.self_attn.qkv_proj, Linear):
            heads = self.self_attn.inner(hidden, norms[0], rotary, context)
            inner = self.mlp.inner(hidden, norms[-1])
        else:
            normed = [norm(hidden) for norm in norms]
            heads = self.self_attn.inner(normed[0], None, rotary, context)
            inner = self.mlp.inner(normed[-1])
        return self._add(hidden, heads, inner)

    def after_attention(self, hidden: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """As `Block`."""
        inner = self.mlp.inner(hidden, getattr(self, self.norms[-1]))
        return self._add(hidden, heads, inner)

    def normed_products(self) -> list[tuple[nn.Module | None, nn.Module | None]]:
        """As `Block`."""
        return self._pairs(self.norms[0], self.norms[-1])

    def products_after(self) -> list[nn.Module | None]:
        """As `Block`."""
        return [self._first_of_mlp(), self.self_attn.o_proj]

    def _add(self, hidden: torch.Tensor, heads: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        products = (self.self_attn.o_proj, heads), (self.mlp.down_proj, inner)
        return self.self_attn.ranks.add(hidden, *products)

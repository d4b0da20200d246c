"""Multi-head latent attention (MLA) of DeepSeek-V2 and the families after it (arXiv 2405.04434)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.latent.layer import LatentAttention
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.norm import RMSNorm
from ...core.nn.quantized import QuantizedLinear
from ...core.nn.rotary import Rotary
from ...core.parallel.sharding import HeadShare
from ...core.protocols.field_kinds import INTEGER, FieldKind
from ...core.protocols.latent_attention import ChosenTokens, LatentAttentionSpec
from .blocks import SelfAttention
from .decoder import CausalLM, Decoder

LATENT_MAP = dataclasses.replace(
    CausalLM.weight_map,
    stacked={
        "q_proj": Shard("down_proj", "q"),
        "q_a_proj": Shard("down_proj", "q_a"),
        "kv_a_proj_with_mqa": Shard("down_proj", "kv_a"),
        "gate_proj": Shard("gate_up_proj", "gate"),
        "up_proj": Shard("gate_up_proj", "up"),
    },
)
"""One product computes attention's parts from hidden states."""
SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT: dict[str, FieldKind] = dict.fromkeys((*SIZES, "q_lora_rank"), INTEGER)
"""Fields of config.json; `check_sizes` checks their values."""


class LatentSelfAttention(SelfAttention):
    """Attention whose keys and values are made from a latent of each token.

    Queries come from hidden states, or with `q_lora_rank` from a narrow vector.
    """

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        """The decoder has checked the sizes."""
        nn.Module.__init__(self)
        hf = config.hf_config
        nope, rope, value = hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim
        heads, narrow = config.num_heads, getattr(hf, "q_lora_rank", None)
        bias = self.output_bias(hf)
        if bias and narrow is None:
            raise ConfigError(
                "attention_bias: it is not supported without q_lora_rank", param="attention_bias"
            )
        self.ranks = build.ranks
        self.own = HeadShare.of(heads, heads, build.ranks.tensor)
        self.num_heads = self.own.num_heads
        key_rows, up_rows, value_rows = (
            slice(self.own.queries.start * size, self.own.queries.stop * size)
            for size in (nope + rope, nope + value, value)
        )
        latent = {"kv_a": hf.kv_lora_rank + rope}
        self.query_dim = self.num_heads * (nope + rope) if narrow is None else narrow
        if narrow is None:
            queries = heads * (nope + rope)
            self.down_proj = MergedLinear(
                hf.hidden_size, {"q": queries, **latent}, build, shard="out",
                shares={"q": key_rows, "kv_a": slice(0, latent["kv_a"])},
            )  # fmt: skip
        else:
            sizes = {"q_a": narrow, **latent}
            self.down_proj = MergedLinear(hf.hidden_size, sizes, build, bias=bias)
            self.q_a_layernorm = RMSNorm(narrow, self.latent_eps(hf), build)
            self.q_b_proj = Linear(
                narrow, heads * (nope + rope), build, shard="out", share=key_rows
            )
        self.narrow = narrow is not None
        self.kv_a_layernorm = RMSNorm(hf.kv_lora_rank, self.latent_eps(hf), build)
        self.kv_b_proj: Linear | QuantizedLinear | None = Linear(
            hf.kv_lora_rank, heads * (nope + value), build, shard="out", share=up_rows
        )
        self.up: torch.Tensor
        """[num_heads * (nope + value), kv_lora_rank]: weight of `kv_b_proj`, never quantized."""
        self.o_proj = Linear(
            heads * value, hf.hidden_size, build, bias=bias, shard="in", share=value_rows
        )
        most, index_dim = self.index_sizes(config, layer)
        spec = LatentAttentionSpec(
            num_heads=self.num_heads,
            latent_dim=hf.kv_lora_rank,
            rope_dim=rope,
            nope_dim=nope,
            value_dim=value,
            scale=(nope + rope) ** -0.5 * rope_scale(config.rope_parameters) ** 2,
            index_topk=most,
        )
        self.latent_attention = LatentAttention(
            spec, build, interleaved=self.interleaved(hf), index_dim=index_dim
        )

    @staticmethod
    def index_sizes(config: ModelConfig, layer: int) -> tuple[int | None, int | None]:
        """Return how many tokens a query reads, and the layer's index key channels; None: all
        tokens, no index keys.
        """
        return None, None

    @staticmethod
    def latent_eps(hf: Any) -> float:
        """Return the eps of the norms of latents and narrow queries; most families do not use
        `rms_norm_eps`.
        """
        return 1e-6

    @staticmethod
    def interleaved(hf: Any) -> bool:
        """Return whether the rotation pairs neighbours, not halves."""
        return bool(getattr(hf, "rope_interleave", True))

    def after_loading(self) -> None:
        """Keep `kv_b_proj`'s dense weight, into which heads are absorbed, and drop its quantized
        form.
        """
        layer = self.kv_b_proj
        assert layer is not None, "called once"
        if isinstance(layer, QuantizedLinear):
            self.register_buffer("up", layer.dense_weight(), persistent=False)
            self.kv_b_proj = None
        else:
            self.up = layer.weight.data

    def inner(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Attention output of all heads for norm(hidden): [num_tokens, hidden_size] → [num_tokens,
        num_heads * value_dim]"""
        query, latent = self.down_proj(hidden, norm=norm).tensor_split((self.query_dim,), dim=-1)
        return self.attend(query, latent, rotary, context)

    def attend(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rotary: Rotary | None,
        context: ForwardContext,
        chosen: ChosenTokens | None = None,
    ) -> torch.Tensor:
        """Attention output of all heads from both parts of the first product → [num_tokens,
        num_heads * value_dim]. chosen: as for `LatentAttention`.
        """
        if self.narrow:
            query = self.q_b_proj(query, norm=self.q_a_layernorm)
        out: torch.Tensor = self.latent_attention(
            self.scaled(query, context), latent, self.up, context, norm=self.kv_a_layernorm,
            rotary=rotary, chosen=chosen,
        )  # fmt: skip
        return out

    def scaled(self, query: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Multiply queries by a family's factors, before the rotation: [num_tokens, num_heads *
        (nope_dim + rope_dim)] → the same shape; may be overwritten.
        """
        return query


class NormedLatentAttention(LatentSelfAttention):
    @staticmethod
    def latent_eps(hf: Any) -> float:
        return float(hf.rms_norm_eps)


class LatentDecoder(Decoder):
    """Rotates the keys' shared channels, and as many of queries. Raises ConfigError for wrong
    sizes.
    """

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        check_sizes(config.hf_config)
        rotary = Rotary(config, build, head_dim=config.hf_config.qk_rope_head_dim)
        return [rotary] * config.num_layers


def rope_scale(rope: dict[str, Any]) -> float:
    """Return the factor of queries and keys with stretched positions (YaRN, arXiv 2309.00071)."""
    factor, all_dim = float(rope.get("factor") or 1.0), rope.get("mscale_all_dim")
    if rope["rope_type"] == "default" or not all_dim or factor <= 1:
        return 1.0
    return 0.1 * float(all_dim) * math.log(factor) + 1.0


def check_sizes(hf: Any) -> None:
    """Raise ConfigError, with the field's name, for a wrong size."""
    for name in SIZES:
        size = getattr(hf, name, None)
        if type(size) is not int or size < 1:
            raise ConfigError(f"{name}: {size!r} is no size", param=name)
    if hf.qk_rope_head_dim % 2:
        raise ConfigError(
            f"qk_rope_head_dim: {hf.qk_rope_head_dim} channels cannot be rotated in pairs",
            param="qk_rope_head_dim",
        )
    narrow = getattr(hf, "q_lora_rank", None)
    if narrow is not None and (type(narrow) is not int or narrow < 1):
        raise ConfigError(f"q_lora_rank: {narrow!r} is no size", param="q_lora_rank")

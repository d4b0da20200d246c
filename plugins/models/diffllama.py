"""DiffLlama: each pair of heads subtracts a part of one's attention from the other's, over the same
values (arXiv 2410.05258).
"""

from __future__ import annotations

import math

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.operations import HeadLayout
from ...core.nn.rotary import Rotary
from ...core.parallel.sharding import HeadShare
from .blocks import SelfAttention
from .decoder import CausalLM
from .parts import WeightlessRMSNorm

FACTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class DifferentialAttention(SelfAttention):
    """Head n of the first half and head n of the second one are a pair, which sees the values of
    both: keys and queries are padded with zeros to the values' width.
    """

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        nn.Module.__init__(self)
        hf, size = config.hf_config, config.head_dim
        for field, count in (
            ("num_attention_heads", config.num_heads), ("num_key_value_heads", config.num_kv_heads),
        ):  # fmt: skip
            if count % 2:
                raise ConfigError(f"{field}: {count} heads are no pairs", param=field)
        pairs, keys = config.num_heads // 2, config.num_kv_heads // 2
        self.ranks, self.operations, self.head_dim = build.ranks, build.operations, size
        self.own = HeadShare.of(pairs, keys, build.ranks.tensor)
        self.num_heads, self.num_kv_heads = 2 * self.own.num_heads, 2 * self.own.num_kv_heads
        sizes = {"q": 2 * pairs * size, "k": 2 * keys * size, "v": 2 * keys * size}
        shares = {
            name: (rows, slice(rows.start + sizes[name] // 2, rows.stop + sizes[name] // 2))
            for name, rows in self.own.rows(size).items()
        }
        self.qkv_proj = MergedLinear(
            hf.hidden_size, sizes, build, bias=self.qkv_bias(hf), shard="out", shares=shares
        )
        self.o_proj = Linear(
            sizes["q"], hf.hidden_size, build, bias=self.output_bias(hf), shard="in",
            share=self.own.rows(2 * size)["q"],
        )  # fmt: skip
        self.layout = HeadLayout(self.num_heads, self.num_kv_heads, size)
        self.attention = Attention(
            msgspec.structs.replace(self.spec(hf, layer), head_dim=2 * size), build
        )
        self.norm = WeightlessRMSNorm(2 * size, hf.rms_norm_eps, build)
        for name in FACTORS:
            setattr(self, name, nn.Parameter(build.empty(size)))
        self.first = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.shardings = {}

    @property
    def factor(self) -> torch.Tensor:
        """[] Weight of the second head of a pair."""
        products = torch.stack([getattr(self, name) for name in FACTORS]).view(2, 2, -1)
        first, second = products.prod(1).sum(-1, dtype=torch.float32).exp().to(products.dtype)
        factor: torch.Tensor = first - second + self.first
        return factor

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        query, key, value = self.operations.heads(
            qkv, self.layout, context.positions, None if rotary is None else rotary.cos_sin,
            None, None,
        )  # fmt: skip
        both = torch.cat(value.chunk(2, dim=1), dim=-1).repeat(1, 2, 1)
        query, key = (F.pad(part, (0, self.head_dim)) for part in (query, key))
        out = self.attention.attend(query, key, both, context)
        first, second = out.view(len(qkv), 2, -1, 2 * self.head_dim).unbind(1)
        difference: torch.Tensor = self.norm(first - self.factor * second) * (1 - self.first)
        return difference.flatten(1)


class DiffLlamaForCausalLM(CausalLM):
    batch_invariant = False
    attention = DifferentialAttention

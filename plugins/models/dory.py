"""Dory: a normalized transformer (nGPT), whose middle layers run several times over each token,
with a cache per time.

Source: nGPT (arXiv 2410.01131): states have length 1, and a layer moves them towards its output.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard, WeightMap
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from ...core.protocols.field_kinds import SIZE, SIZE_OR_ZERO
from ...core.protocols.models import HiddenStates
from .blocks import Block, BlockParts
from .decoder import CausalLM, rotaries_by_type
from .looped import LoopedDecoder
from .windows import WindowedAttention

EPS = 1e-6
"""Added to squared lengths."""


class UnitNorm(RMSNorm):
    def __init__(self, size: int, build: BuildContext) -> None:
        super().__init__(size, EPS / size, build)
        factor = torch.full_like(self.weight.data, size**-0.5, dtype=torch.float32)
        del self.weight
        self.register_buffer("weight", factor, persistent=False)


class DoryAttention(WindowedAttention):
    """Queries and keys of length 1, queries then times learned factors; outputs times the sigmoid
    of a gate, all heads' together of length 1."""

    attention: Any

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        hf: Any = config.hf_config
        self.operations, self.width = build.operations, self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        sizes = {"q": self.width, "k": keys, "v": keys, "g": self.width}
        self.qkv_proj = MergedLinear(hf.hidden_size, sizes, build)
        recurrent = range(hf.n_input_layers, hf.n_input_layers + hf.n_recurrent_layers)
        count, spec = hf.n_recurrent_loops if layer in recurrent else 1, self.attention.spec
        self.attention = nn.ModuleList(Attention(spec, build) for _ in range(count))
        self.head_norm = UnitNorm(self.head_dim, build)
        self.out_norm = UnitNorm(self.width, build)
        self.sqk = nn.Parameter(build.empty(self.width))
        self.s_gate = nn.Parameter(build.empty(self.width))
        self.scales = (self.head_dim**0.5, hf.hidden_size**0.25)
        self.unit = float(hf.initializer_range)

    def after_loading(self) -> None:
        for weight, scale in zip((self.sqk, self.s_gate), self.scales, strict=True):
            weight.data.mul_(scale / self.unit).square_()

    def looped(
        self, hidden: torch.Tensor, rotary: Rotary, context: ForwardContext, loop: int
    ) -> torch.Tensor:
        attention, norm = self.attention[loop], self.head_norm.norm
        qkv, gate = self.qkv_proj(hidden).tensor_split((-self.width,), dim=-1)
        query, key, value = self.operations.heads(
            qkv.contiguous(), attention.layout, context.positions, rotary.cos_sin, norm, norm
        )
        query = query * self.sqk.view(-1, self.head_dim)
        heads = attention.attend(query, key, value, context)
        heads = self.operations.sigmoid_gate(heads, gate * self.s_gate)
        return self.project(self.out_norm(heads))


class DoryMLP(nn.Module):
    """down(gate(x) * up(x) normed to length 1), with learned factors on gate and up."""

    def __init__(self, hf: Any, build: BuildContext) -> None:
        super().__init__()
        size, inner = hf.hidden_size, hf.intermediate_size
        self.operations = build.operations
        self.gate_up_proj = MergedLinear(size, {"gate": inner, "up": inner}, build)
        self.down_proj = Linear(inner, size, build)
        self.suv_gate = nn.Parameter(build.empty(inner))
        self.suv_up = nn.Parameter(build.empty(inner))
        self.norm = UnitNorm(inner, build)
        self.scale = size**0.5

    def after_loading(self) -> None:
        for weight in (self.suv_gate, self.suv_up):
            weight.data.mul_(self.scale)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        gate = self.operations.pointwise(F.silu, gate * self.suv_gate)
        inner = gate * (up * self.suv_up)
        out: torch.Tensor = self.down_proj(inner, norm=self.norm)
        return out


class DoryBlock(Block):
    """Moves the state towards attention's output, then towards the MLP's."""

    norms = ("unit",)
    unit: UnitNorm
    self_attn: DoryAttention

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        hf: Any = parts.config.hf_config
        build = parts.build
        self.lambda_1 = nn.Parameter(build.empty(hf.hidden_size))
        self.lambda_2 = nn.Parameter(build.empty(hf.hidden_size))
        self.scale = float(hf.ngpt_alpha_init / hf.initializer_range)

    @classmethod
    def make_norm(cls, hf: Any, build: BuildContext) -> nn.Module:
        return UnitNorm(hf.hidden_size, build)

    def after_loading(self) -> None:
        for weight in (self.lambda_1, self.lambda_2):
            weight.data.mul_(self.scale).abs_()

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext, loop: int = 0
    ) -> torch.Tensor:
        assert rotary is not None, "all layers rotate"
        hidden = self.unit(hidden)
        attn_output = self.self_attn.looped(hidden, rotary, context, loop)
        hidden = self.unit(torch.lerp(hidden, self.unit(attn_output), self.lambda_1))
        return torch.lerp(hidden, self.unit(self.mlp(hidden)), self.lambda_2)


class DoryDecoder(LoopedDecoder):
    block = DoryBlock
    loops_field = "n_recurrent_loops"
    rotaries_of = staticmethod(rotaries_by_type)

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        hf: Any = parts.config.hf_config
        start = hf.n_input_layers
        self.recurrent = slice(start, start + hf.n_recurrent_layers)

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] → [num_tokens, hidden_size], not normed; each loop also gets the earlier
        layers' result.
        """
        hidden = self.embed(input_ids, context.positions)
        if context.precompiling:
            return self.run(self.norm(hidden), self.unlike_layers(), context)
        layers = self.stage_layers()
        hidden = self.run(hidden, layers[: self.recurrent.start], context)
        first = self.norm(hidden)
        for loop in range(self.num_loops):
            hidden = self.run(self.norm(hidden) + first, layers[self.recurrent], context, loop)
        return self.run(hidden, layers[self.recurrent.stop :], context)

    @staticmethod
    def run(
        hidden: torch.Tensor,
        layers: list[tuple[nn.Module, nn.Module]],
        context: ForwardContext,
        loop: int = 0,
    ) -> torch.Tensor:
        for layer, rotary in layers:
            hidden = layer(hidden, rotary, context, loop)
        return hidden


class PairedWeightMap(WeightMap):
    """Published checkpoints number attention and MLP separately; those that `transformers` saves do
    not.
    """

    def renamed(self, name: str) -> str:
        def number(at: re.Match[str]) -> str:
            layer, second = divmod(int(at[1]), 2)
            rates = {"attn_alpha": "lambda_1", "mlp_alpha": "lambda_2"}
            return f"layers.{layer}.{rates.get(at[2]) or ('self_attn', 'mlp')[second]}"

        name = re.sub(r"\blayers\.(\d+)\.(mixer|attn_alpha|mlp_alpha)\b", number, name)
        return super().renamed(name)

    def source(self, parameter: str, shard: str | None = None) -> str:
        def number(at: re.Match[str]) -> str:
            second = at[2] in ("mlp", "lambda_2")
            rates = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha"}
            return f"layers.{2 * int(at[1]) + second}.{rates.get(at[2], 'mixer')}"

        name = super().source(parameter, shard)
        return re.sub(r"\blayers\.(\d+)\.(self_attn|mlp|lambda_1|lambda_2)\b", number, name)


class DoryForCausalLM(CausalLM):
    tensor_parallel = False
    config_fields = {
        "n_input_layers": SIZE_OR_ZERO.not_null(), "n_output_layers": SIZE_OR_ZERO.not_null(),
        "n_recurrent_layers": SIZE_OR_ZERO, "n_recurrent_loops": SIZE.not_null(),
    }  # fmt: skip
    attention = DoryAttention
    decoder = DoryDecoder
    weight_map: WeightMap = PairedWeightMap(
        stacked={**CausalLM.weight_map.stacked, "out_gate_proj": Shard("qkv_proj", "g")},
        tied=CausalLM.weight_map.tied,
        prefixes={"backbone.": "model."},
        names={
            "embed_tokens": "embeddings", "self_attn.out_gate_proj": "self_attn.g_proj",
            "logit_scale": "lm_head.logit_scale",
        },
        ignored=("logit_scale",),
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf: Any = config.hf_config
        for field in ("attention_bias", "mlp_bias"):
            if getattr(hf, field):
                raise ConfigError(f"{field}: only false is supported", param=field)
        if hf.hidden_act != "silu":
            raise ConfigError(f"hidden_act: {hf.hidden_act!r} is not supported", param="hidden_act")
        if hf.recurrent_kv_cache_mode != "per_loop":
            raise ConfigError(
                f"recurrent_kv_cache_mode: with {hf.recurrent_kv_cache_mode!r}, answers would "
                "depend on how prompts are divided into steps; --hf-overrides "
                '\'{"recurrent_kv_cache_mode": "per_loop"}\' has a cache for each loop',
                param="recurrent_kv_cache_mode",
            )
        super().__init__(config, build)
        if config.pooling is None:
            wide = dataclasses.replace(build, dtype=torch.float32)
            self.logit_scale = nn.Parameter(wide.empty(config.vocab_size))
            self.unit = float(hf.initializer_range)

    def after_loading(self) -> None:
        if hasattr(self, "logit_scale"):
            self.logit_scale.data.div_(self.unit)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        return DoryMLP(config.hf_config, build)

    def compute_logits(self, hidden: HiddenStates) -> torch.Tensor:
        return super().compute_logits(hidden).float() * self.logit_scale

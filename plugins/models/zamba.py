"""Zamba: multi-head Mamba in every layer, and before some a shared block of unrotated attention and
MLP.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder, WeightMap
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear
from ...core.nn.state.layer import CausalConv, StateMixer
from ...core.nn.state.mamba import MambaSizes
from ...core.nn.state.operations import ScanWeights
from ...core.parallel.ranks import ONE_RANK, Product
from .decoder import CausalLM
from .zamba2 import Zamba2Decoder, Zamba2ForCausalLM


class HeadsMamba(StateMixer):
    """Mamba with heads of channels, each with its own step sizes, keys and queries."""

    def __init__(self, sizes: MambaSizes, heads: int, hf: Any, build: BuildContext) -> None:
        width, state = sizes.inner // heads, sizes.state_size
        self.names = [f"ssm{head}" for head in range(heads)]
        """Name of each head's state."""
        super().__init__(
            conv=((sizes.kernel - 1, sizes.inner), build.dtype),
            **dict.fromkeys(self.names, ((width, state), torch.float32)),
        )
        bias = bool(hf.mamba_proj_bias)
        self.sizes, self.operations, self.ranks = sizes, build.operations, ONE_RANK
        self.in_proj = Linear(sizes.hidden_size, 2 * sizes.inner, build, bias=bias)
        self.conv1d = CausalConv(sizes.inner, sizes.kernel, build, bias=bool(hf.mamba_conv_bias))
        self.x_proj_weight = nn.Parameter(build.empty(heads, sizes.rank + 2 * state, width))
        self.dt_proj_weight = nn.Parameter(build.empty(heads, width, sizes.rank))
        self.dt_proj_bias = nn.Parameter(build.empty(heads, width))
        self.A_log = nn.Parameter(build.empty(heads, width, state))
        self.D = nn.Parameter(build.empty(heads, width))
        self.out_proj = Linear(sizes.inner, sizes.hidden_size, build, bias=bias)
        self.weights: list[ScanWeights]

    def after_loading(self) -> None:
        parts = (-self.A_log.detach().float().exp(), self.D.detach().float(), self.dt_proj_bias)
        self.weights = [
            ScanWeights(rate, skip, bias.detach().float())
            for rate, skip, bias in zip(*parts, strict=True)
        ]

    def mix(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: ForwardContext
    ) -> tuple[Product, torch.Tensor]:
        sizes, rows = self.sizes, context.layout.state_rows
        x, gate = self.in_proj(hidden, norm=norm).chunk(2, dim=-1)
        x = self.operations.causal_conv(
            x, self.conv1d.kernel, self.conv1d.bias, self.state("conv"), rows, silu=True
        )
        heads, out = len(self.names), []
        inputs, gates = (part.tensor_split(heads, dim=-1) for part in (x, gate))
        for head, name in enumerate(self.names):
            parts = inputs[head] @ self.x_proj_weight[head].T
            steps, keys, queries = parts.split([sizes.rank, *[sizes.state_size] * 2], dim=-1)
            out.append(self.operations.selective_scan(
                inputs[head], steps @ self.dt_proj_weight[head].T, keys, queries, gates[head],
                self.weights[head], self.state(name), rows,
            ))  # fmt: skip
        return self.out_proj, torch.cat(out, dim=-1)


class ZambaDecoder(Zamba2Decoder):
    @staticmethod
    def check(hf: Any) -> None:
        for field, served in (
            ("hidden_mamba_act", "silu"),
            ("attention_hidden_size", 2 * hf.hidden_size),
        ):
            if getattr(hf, field) != served:
                raise ConfigError(f"{field}: {getattr(hf, field)!r} is not supported", param=field)

    @staticmethod
    def mixer(hf: Any, build: BuildContext) -> StateMixer:
        inner = hf.mamba_expand * hf.hidden_size
        sizes = MambaSizes(
            hf.hidden_size, inner, hf.mamba_d_state, int(hf.mamba_dt_rank), hf.mamba_d_conv
        )
        return HeadsMamba(sizes, hf.n_mamba_heads, hf, build)


class ZambaForCausalLM(Zamba2ForCausalLM):
    decoder = ZambaDecoder
    weight_map: WeightMap = dataclasses.replace(
        CausalLM.weight_map,
        names={"model.norm": "model.final_layernorm", "shared_transformer": "shared_transf"},
    )

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        """Rows of inputs and gates are interleaved."""
        hf = config.hf_config
        return {"in_proj": RowOrder.halves(2 * hf.mamba_expand * hf.hidden_size)}

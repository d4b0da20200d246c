"""Gemma 3n (text): several streams, which a layer predicts; it computes one and corrects the others
(AltUp), a low-rank path beside attention (LAuReL), and MLPs whose gates are mostly zero. Attention
and the inputs of each layer are those of Gemma 4's small sizes. Sources: AltUp (arXiv 2301.13310),
LAuReL (arXiv 2411.07501).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import Router
from ...core.nn.linear import Linear
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from ...core.parallel.missing_layer import MissingLayer
from .blocks import BlockParts, NormedBlock
from .decoder import CausalLM
from .gemma4 import (
    INPUTS,
    Gemma4Attention,
    Gemma4Block,
    Gemma4Decoder,
    Gemma4ForCausalLM,
    Gemma4WeightMap,
)
from .per_layer_inputs import PER_LAYER_NAMES, PerLayerInput

LEAST = 1e-5
"""Lower bound on a stream's mean square."""


def as_large_as(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Scale rows to the norms of another tensor's; both [num_tokens, hidden_size]."""
    own = x.square().mean(-1, keepdim=True).clamp(min=LEAST).sqrt()
    return x * other.square().mean(-1, keepdim=True).sqrt() / own


class SparseGeluMLP(GatedMLP):
    """Keeps only gates above a quantile of a normal distribution fitted to them."""

    cutoff: float
    """Standard deviations above the mean."""

    def inner(self, hidden: torch.Tensor, norm: nn.Module | None = None) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden, norm=norm).chunk(2, dim=-1)
        deviation = torch.std(gate, dim=-1, keepdim=True, unbiased=False)
        gate = F.relu(gate - (gate.mean(-1, keepdim=True) + deviation * self.cutoff))
        inner: torch.Tensor = F.gelu(gate, approximate="tanh") * up
        return inner


class AltUp(nn.Module):
    """Predicts and corrects streams: [num_streams, num_tokens, hidden_size]."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        count, size = hf.altup_num_inputs, hf.hidden_size
        self.count, self.active, self.scales = count, hf.altup_active_idx, hf.altup_correct_scale
        self.correct_output_scale = nn.Parameter(build.empty(size))
        self.correction_coefs = Router(count, count, build)
        self.prediction_coefs = Router(count * count, count, build)
        self.modality_router = Router(count, size, build)
        self.router_norm = RMSNorm(size, hf.rms_norm_eps, build)

    def _weights(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.modality_router(self.router_norm(hidden) / hidden.shape[-1])
        return torch.tanh(logits.float()).to(hidden.dtype)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        factors = self.prediction_coefs(self._weights(streams[self.active]))
        factors = factors.view(-1, self.count, self.count)
        return torch.einsum("toi,ith->oth", factors, streams) + streams

    def correct(self, predictions: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """`computed`: the active stream, [num_tokens, hidden_size]."""
        factors = self.correction_coefs(self._weights(computed)) + 1.0
        corrected: torch.Tensor = (computed - predictions[self.active]) * factors.t()[..., None]
        return corrected + predictions


class Laurel(nn.Module):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.linear_left = Linear(hf.hidden_size, hf.laurel_rank, build)
        self.linear_right = Linear(hf.laurel_rank, hf.hidden_size, build)
        self.post_laurel_norm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, build)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.post_laurel_norm(self.linear_right(self.linear_left(hidden)))
        return hidden + normed


class Gemma3nBlock(NormedBlock):
    norms = Gemma4Block.norms
    self_attn: Gemma4Attention

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        config, build = parts.config, parts.build
        hf = config.hf_config
        self.altup, self.laurel = AltUp(config, build), Laurel(config, build)
        self.per_layer_input = PerLayerInput(hf, build)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        """hidden: of all streams, [num_streams, num_tokens, hidden_size] → the same shape"""
        norms = [getattr(self, name) for name in self.norms]
        pre_attn_norm, post_attn_norm, pre_mlp_norm, post_mlp_norm = norms
        altup = self.altup
        predictions = altup.predict(hidden)
        active = predictions[altup.active].contiguous()
        normed = pre_attn_norm(active)
        heads = self.self_attn.inner(normed, None, rotary, context)
        hidden = active + post_attn_norm(self.self_attn.project(heads))
        hidden = (hidden + self.laurel(normed)) / math.sqrt(2)
        hidden = post_mlp_norm.add(self.mlp(hidden, pre_mlp_norm, add=False), hidden)
        streams = altup.correct(predictions, hidden)
        first = streams[altup.active].contiguous()
        if altup.scales:
            first = first * altup.correct_output_scale
        streams[1:] += self.per_layer_input(first, context.shared[INPUTS])
        return streams


class Gemma3nDecoder(Gemma4Decoder):
    block = Gemma3nBlock  # type: ignore[assignment]

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        hf, build = parts.config.hf_config, parts.build

        def products() -> nn.ModuleList:
            others = range(1, hf.altup_num_inputs)
            return nn.ModuleList(Linear(hf.hidden_size, hf.hidden_size, build) for _ in others)

        pipeline = build.ranks.pipeline
        self.altup_projections: Any = products() if pipeline.first else MissingLayer()
        self.altup_unembed_projections: Any = products() if pipeline.last else MissingLayer()

    @staticmethod
    def count_streams(hf: Any) -> int:
        return int(hf.altup_num_inputs)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] → [num_streams, num_tokens, hidden_size]"""
        others = [as_large_as(product(hidden), hidden) for product in self.altup_projections]
        return torch.stack([hidden, *others])

    def leave(self, states: torch.Tensor) -> torch.Tensor:
        """[num_streams, num_tokens, hidden_size] → [num_tokens, hidden_size]"""
        first, *rest = states
        pairs = zip(self.altup_unembed_projections, rest, strict=True)
        others = [as_large_as(product(stream.contiguous()), first) for product, stream in pairs]
        return torch.stack([first, *others]).mean(dim=0)

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        """[num_streams, num_tokens, hidden_size] → [num_tokens, states_size]"""
        return states.transpose(0, 1).flatten(1)

    def separated(self, states: torch.Tensor) -> torch.Tensor:
        """[num_tokens, states_size] → [num_streams, num_tokens, hidden_size]"""
        return states.view(len(states), self.num_streams, -1).transpose(0, 1).contiguous()


class Gemma3nForCausalLM(Gemma4ForCausalLM):
    batch_invariant = False
    tensor_parallel = False
    decoder = Gemma3nDecoder
    weight_map = Gemma4WeightMap(**vars(CausalLM.weight_map) | {"names": PER_LAYER_NAMES})

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        sparsity = hf.activation_sparsity_pattern[layer]
        mlp = (SparseGeluMLP if sparsity > 0 else GatedMLP)(
            hf.hidden_size, hf.intermediate_size[layer], hf.hidden_activation, build,
            field="hidden_activation",
        )  # fmt: skip
        if isinstance(mlp, SparseGeluMLP):
            mlp.cutoff = float(torch.tensor(NormalDist().inv_cdf(sparsity)).to(build.dtype))
        return mlp

"""The arithmetic of layers on Triton kernels; products of many tokens stay with cuBLAS."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...core.nn.activations import ExpertActivation
from ...core.nn.kv_cache.quantized_cache import KVCache, QuantizedCache, code_bits
from ...core.nn.layer_operations.experts import ExpertWeight
from ...core.nn.layer_operations.heads import split_heads
from ...core.nn.layer_operations.products import AnyNorm
from ...core.nn.operations import CenteredNorm, HeadLayout, Norm, Operations
from ...core.nn.quantized_weight import QuantizedWeight
from ...core.nn.routing import Routing, RoutingRule
from ...kernels.activations import gelu_mul, silu_mul, xielu
from ...kernels.attention.norm_heads import norm_heads
from ...kernels.attention.qk_norm_rope_cache import qk_norm_rope_cache
from ...kernels.compile import Precompiler, can_precompile, load_compiler, num_loaded
from ...kernels.embedding import embed
from ...kernels.linear.gemv import gemv
from ...kernels.linear.normed_linear import normed_linear, takes_normed_linear
from ...kernels.linear.small_m_matmul import (
    MAX_TILES,
    SmallMConfig,
    SplitKWorkspace,
    small_m_matmul,
    split_k_floats,
)
from ...kernels.moe.topk_experts import ROWS, topk_experts
from ...kernels.rms_norm import rms_norm
from ...kernels.sigmoid_gate import sigmoid_gate
from ...kernels.tuning import Product, gemv_tiles, small_m_config
from .adapters import TritonAdapters
from .experts import expert_products, experts_product, experts_serve
from .indexing import TritonIndexing
from .latents import TritonLatents
from .quantized import quantized_product
from .states import TritonStates
from .steps import TritonSteps

WORKSPACE_FLOATS = 4 << 20
"""Floats for partial sums of split-K products."""


def _norm_of(norm: AnyNorm | None) -> dict[str, Any]:
    if isinstance(norm, CenteredNorm):
        return {"layer_norm": norm[:3], "norm_sums": norm.sums}
    return {"norm": norm}


class TritonLayers(
    TritonStates, TritonLatents, TritonIndexing, TritonSteps, TritonAdapters, Operations
):
    """One token: fused matrix-vector products; a few: `small_m_matmul` where measured faster; more:
    cuBLAS with kernels around it. If `batch_invariant`, one kernel for any number of tokens, whose
    product the subclass has (`several_rows`).
    """

    embed = staticmethod(embed)
    silu_mul = staticmethod(silu_mul)
    gelu_mul = staticmethod(gelu_mul)
    sigmoid_gate = staticmethod(sigmoid_gate)
    xielu = staticmethod(xielu)
    norm_heads = staticmethod(norm_heads)

    def __init__(self) -> None:
        super().__init__()
        self._workspaces: dict[torch.device, SplitKWorkspace] = {}

    @classmethod
    def initialize_device(cls, device: torch.device) -> None:
        if device.type == "cuda" and can_precompile():
            load_compiler(device)

    def precompile(self, device: torch.device) -> Precompiler | None:
        return Precompiler(device) if device.type == "cuda" and can_precompile() else None

    def num_loaded(self) -> int:
        return num_loaded()

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps)

    def add_rms_norm(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps, residual)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: AnyNorm | None = None,
        residual: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> torch.Tensor:
        if self._takes_gemv(x):
            return gemv(
                x, weight, bias, **_norm_of(norm), residual=residual, factor=factor,
                config=gemv_tiles(weight, gated=False),
            )  # fmt: skip
        if norm is not None:
            x = self.normed(x, norm)
        if factor == 1.0:
            return self.several_rows(x, weight, bias, residual=residual)
        out = self.several_rows(x, weight, bias)
        return out.mul_(factor) if residual is None else residual.add_(out, alpha=factor)

    def normed_linear(
        self, x: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.batch_invariant or not takes_normed_linear(x, weight):
            return super().normed_linear(x, norm, weight, bias)
        return normed_linear(x, norm, weight, bias)

    def activated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: str,
        norm: AnyNorm | None = None,
    ) -> torch.Tensor:
        if self._takes_gemv(x):
            return gemv(
                x, weight, bias, **_norm_of(norm), activation=activation,
                config=gemv_tiles(weight, gated=False),
            )  # fmt: skip
        return super().activated_linear(x, weight, bias, activation=activation, norm=norm)

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: AnyNorm | None = None,
    ) -> torch.Tensor:
        if self._takes_gemv(x):
            tiles = gemv_tiles(weight, gated=True)
            return gemv(x, weight, bias, **_norm_of(norm), gated=True, config=tiles)
        if norm is not None:
            x = self.normed(x, norm)
        return self.several_rows(x, weight, bias, gated=True)

    def _takes_gemv(self, x: torch.Tensor) -> bool:
        return x.shape[0] == 1 and not self.batch_invariant

    def several_rows(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """Return residual + x Wᵀ + bias, or silu(gate) * up of it, of any number of tokens.
        `residual` may be overwritten."""
        if (config := self._small_m_config(x, weight, gated=gated)) is not None:
            return small_m_matmul(
                x, weight, bias, residual=residual, gated=gated, config=config,
                workspace=self._workspace(x.device), out=residual,
            )  # fmt: skip
        if residual is not None and bias is None:
            return residual.addmm_(x, weight.t())
        out = self.product(x, weight, bias)
        if gated:
            return self.silu_mul(out)
        return out if residual is None else residual + out

    def _small_m_config(
        self, x: torch.Tensor, weight: torch.Tensor, *, gated: bool
    ) -> SmallMConfig | None:
        """Return the tiles of `small_m_matmul`; None if a library is faster, or the only one."""
        outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        config = small_m_config(Product(outputs, weight.shape[1], gated), x.shape[0], x.device)
        if config is None or x.dtype == torch.float32:
            return None
        if split_k_floats(x.shape[0], outputs, config.split_k, gated) > WORKSPACE_FLOATS:
            return None
        return config

    def _workspace(self, device: torch.device) -> SplitKWorkspace:
        """Created once: captured graphs hold its addresses."""
        if device not in self._workspaces:
            self._workspaces[device] = SplitKWorkspace(
                torch.empty(WORKSPACE_FLOATS, dtype=torch.float32, device=device),
                torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
            )
        return self._workspaces[device]

    def quantized_linear(
        self,
        x: torch.Tensor,
        weight: QuantizedWeight,
        bias: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        return quantized_product(
            self, x, weight, bias, norm=norm, residual=residual, gated=gated,
            workspace=self._workspace, uniform=self.batch_invariant,
        )  # fmt: skip

    def route(self, logits: torch.Tensor, rule: RoutingRule) -> Routing:
        weights, experts = topk_experts(
            logits, rule.top_k, renormalize=rule.renormalize, sigmoid=rule.scoring == "sigmoid",
            bias=rule.bias, factor=rule.factor, groups=rule.groups, top_groups=rule.top_groups,
            first=rule.first,
            rows=ROWS if self.batch_invariant else None,
        )  # fmt: skip
        return Routing(weights, experts)

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        *,
        residual: torch.Tensor | None,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        activation: ExpertActivation | None = None,
    ) -> torch.Tensor:
        compute = super().experts
        if experts_serve(gate_up, down):
            compute = functools.partial(experts_product, uniform=self.batch_invariant)
        return compute(
            x, routing, gate_up, down, residual=residual, gate_up_bias=gate_up_bias,
            down_bias=down_bias, activation=activation,
        )  # fmt: skip

    def expert_products(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weight: ExpertWeight,
        num_experts: int,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not experts_serve(weight):
            return super().expert_products(x, experts, weight, num_experts, bias)
        uniform = self.batch_invariant
        return expert_products(x, experts, weight, num_experts, bias, uniform=uniform)

    def heads(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qk_norm_rope_cache(
            qkv, layout.num_heads, layout.num_kv_heads, positions, cos_sin, query_norm, key_norm
        )
        return split_heads(qkv, layout)

    def cached_heads(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        kv_cache: KVCache,
        slot_mapping: torch.Tensor,
        cache_scales: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if isinstance(kv_cache, QuantizedCache) and cos_sin is not None:
            packed = 4 in (code_bits(kv_cache.keys), code_bits(kv_cache.values))
            if packed and cos_sin.shape[1] < layout.head_dim:
                # The kernel has other channels together than those that share a byte.
                return super().cached_heads(
                    qkv, layout, positions, cos_sin, query_norm, key_norm, kv_cache, slot_mapping
                )
        qk_norm_rope_cache(
            qkv,
            layout.num_heads,
            layout.num_kv_heads,
            positions,
            cos_sin,
            query_norm,
            key_norm,
            kv_cache,
            slot_mapping,
            cache_scales,
        )
        return split_heads(qkv, layout)

"""State operations on Triton kernels: one to three launches each; for rows of one token, one launch
for all between a layer's projections.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ...core.nn.state.operations import (
    ConvWeights,
    DeltaWeights,
    GatedNorm,
    Mamba2Factors,
    ScanWeights,
    StateOperations,
)
from ...core.nn.state.rows import StateRows
from ...core.nn.state.sizes import DeltaSizes, Mamba2Sizes
from ...kernels.sigmoid_gate import silu_gate
from ...kernels.state.causal_conv import causal_conv
from ...kernels.state.channel_delta_rule import channel_delta_rule
from ...kernels.state.delta_net_step import delta_net_step
from ...kernels.state.delta_rule import delta_rule
from ...kernels.state.gated_rms_norm import gated_rms_norm
from ...kernels.state.mamba2_step import mamba2_step
from ...kernels.state.selective_scan import selective_scan
from ...kernels.state.ssd_scan import ssd_scan

MAX_COUNTERS = 1 << 14
"""Most rows times groups of heads of a step in one launch."""


class TritonStates(StateOperations):
    mixed_states: ClassVar[bool] = True

    causal_conv = staticmethod(causal_conv)
    ssd_scan = staticmethod(ssd_scan)
    selective_scan = staticmethod(selective_scan)
    delta_rule = staticmethod(delta_rule)
    channel_delta_rule = staticmethod(channel_delta_rule)
    gated_rms_norm = staticmethod(gated_rms_norm)
    silu_gate = staticmethod(silu_gate)

    def __init__(self) -> None:
        super().__init__()
        self._state_counters: dict[torch.device, torch.Tensor] = {}

    def _counters(self, device: torch.device) -> torch.Tensor:
        """[MAX_COUNTERS] int32 zeros, created once: captured graphs hold its address."""
        if device not in self._state_counters:
            zeros = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
            self._state_counters[device] = zeros
        return self._state_counters[device]

    def mamba2(
        self,
        projected: torch.Tensor,
        conv: ConvWeights,
        weights: ScanWeights,
        sizes: Mamba2Sizes,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        rows: StateRows,
        *,
        norm: GatedNorm | None = None,
        factors: Mamba2Factors | None = None,
    ) -> torch.Tensor:
        """Rows of one token take one launch."""
        single = rows.max_query_len == 1
        if not single or rows.num_tokens * sizes.num_groups > MAX_COUNTERS:
            return super().mamba2(
                projected, conv, weights, sizes, conv_state, state, rows, norm=norm,
                factors=factors,
            )  # fmt: skip
        return mamba2_step(
            projected, *conv, conv_state, weights.a, weights.d, weights.dt_bias, weights.dt_limit,
            state, rows, self._counters(projected.device), groups=sizes.num_groups,
            norm=norm, factors=factors,
        )  # fmt: skip

    def delta_net(
        self,
        projected: torch.Tensor,
        kernel: torch.Tensor,
        weights: DeltaWeights,
        norm: torch.Tensor,
        eps: float,
        sizes: DeltaSizes,
        conv_state: torch.Tensor,
        state: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        """Rows of one token take one launch."""
        single = rows.max_query_len == 1
        if not single or rows.num_tokens * sizes.num_key_heads > MAX_COUNTERS:
            return super().delta_net(
                projected, kernel, weights, norm, eps, sizes, conv_state, state, rows
            )
        return delta_net_step(
            projected, kernel, conv_state, *weights, norm, eps, state, rows,
            self._counters(projected.device), groups=sizes.num_key_heads,
        )  # fmt: skip

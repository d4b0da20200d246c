"""Operations on states, in plain torch: a part of `Operations`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from .rows import StateRows
from .scan import (
    delta_step,
    delta_tokens,
    selective_step,
    selective_tokens,
    ssd_step,
    ssd_tokens,
)
from .sizes import DeltaSizes, Mamba2Sizes


class ConvWeights(NamedTuple):
    """Parameters of a convolution of each channel."""

    kernel: torch.Tensor
    """[channels, inputs that an output sees]"""
    bias: torch.Tensor | None
    """[channels]"""


class ScanWeights(NamedTuple):
    """Parameters of a state-space layer, all float32. Mamba 2 has one of each per head: [H]; Mamba
    has them per channel, `a` also per state: [I, N]."""

    a: torch.Tensor
    """Rate of decay, negative."""
    d: torch.Tensor
    """Factor of the input in the output."""
    dt_bias: torch.Tensor
    """Added to the step size, before softplus."""
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Range of the step size, after softplus."""

    def step_size(self, dt: torch.Tensor) -> torch.Tensor:
        """Return clamp(softplus(dt + bias)), float32."""
        return F.softplus(dt.float() + self.dt_bias).clamp(*self.dt_limit)


class Mamba2Factors(NamedTuple):
    """Factors of what a layer of Mamba 2 has between its projections; those of the convolution's
    inputs are in its weights."""

    gate: float
    steps: float
    out: float
    """Of the gated result."""


class GatedNorm(NamedTuple):
    """A norm of groups of channels, and the place of their gate."""

    weight: torch.Tensor
    """[channels]"""
    eps: float
    gate_first: bool
    """Whether silu(gate) comes before the norm."""


class DeltaWeights(NamedTuple):
    """Parameters of a gated delta net, [H] float32."""

    rate: torch.Tensor
    """Rate of decay, negative."""
    dt_bias: torch.Tensor
    """Added to the step size, before softplus."""


class ChannelDeltaWeights(NamedTuple):
    """Parameters of a delta rule with a decay for each channel, float32."""

    rate: torch.Tensor
    """[H] Rate of decay, negative."""
    dt_bias: torch.Tensor
    """[H, K] Added to the step size."""
    bound: float | None = None
    """Least logarithm of a decay, of the bounded form."""
    strength: float = 1.0
    """Factor of sigmoid(beta), which says how much of what is missing is added."""

    def decay(self, step: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of each channel's decay: [T, H, K] → the same shape, float32."""
        wide, rate = step.float() + self.dt_bias, self.rate[:, None]
        if self.bound is None:
            return rate * F.softplus(wide)
        return self.bound * torch.sigmoid(-rate * wide)


class StateOperations:
    """T tokens in R rows (`StateRows`). Every row's tokens continue its slot's state, and leave it
    as it is after the last of them; sums are float32."""

    mixed_states: ClassVar[bool] = False
    """Whether these operations read a step's rows on the device alone (`StateRows.mixed`), so that
    steps with prompts can be recorded. A step in which every row has one token always can."""

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        rows: StateRows,
        *,
        silu: bool,
    ) -> torch.Tensor:
        """Convolve each channel over a row's tokens: y[t] = Σ weight[k] x[t - K + 1 + k] + bias.

        x: [T, C], may be a view of a wider tensor; weight: [C, K]; bias: [C]; state: [num_states,
        K - 1, C], the inputs before the row's first; silu: apply it → [T, C]
        """
        last = weight.shape[1] - 1
        old = rows.states(state)
        num_rows, device = len(old), x.device
        inputs = torch.cat([old.flatten(0, 1).to(x.dtype), x])
        lags = torch.arange(last, -1, -1, device=device)
        tokens = torch.arange(len(x), device=device)
        row = rows.token_rows
        place = (tokens - rows.query_start[row])[:, None] - lags
        index = torch.where(
            place < 0,
            (row * last)[:, None] + last + place,
            num_rows * last + tokens[:, None] - lags,
        )
        wide = (inputs[index].float() * weight.t().float()).sum(1)
        if bias is not None:
            wide = wide + bias.float()
        every = torch.arange(num_rows, device=device)[:, None]
        place = rows.counts[:, None] - lags[:-1]
        index = torch.where(
            place < 0, every * last + last + place,
            num_rows * last + rows.query_start[:-1, None] + place,
        )  # fmt: skip
        state[rows.slots.long()] = inputs[index].to(state.dtype)
        return (F.silu(wide) if silu else wide).to(x.dtype)

    def ssd_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        weights: ScanWeights,
        state: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        """Mamba 2's recurrence: S = exp(dt a) S + dt x bᵀ, y = S c + d x, with dt the step size of
        `weights`.

        x: [T, H, P]; dt: [T, H]; b, c: [T, G, N], each for H / G heads; state: [num_states, H, P,
        N]; all but state may be views of wider tensors → [T, H, P]
        """
        each = x.shape[1] // b.shape[1]
        keys, queries = (part.float().repeat_interleave(each, dim=1) for part in (b, c))
        values = x.float()
        y = _scan(
            ssd_step, ssd_tokens, (values, weights.step_size(dt)), (weights.a,), (keys, queries),
            state, rows,
        )  # fmt: skip
        return (y + weights.d[:, None] * values).to(x.dtype)

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
        """Mamba 2 between its projections: `causal_conv` with silu, `ssd_scan` of its outputs, and
        `gated_rms_norm` of each group of channels; without a norm, times silu(gate) and
        `factors.out`.

        projected: [T, widths of `sizes.projection`], last stride 1; conv_state: [num_states, K - 1,
        C], state: [num_states, H, P, N], contiguous → [T, H P]
        """
        gate, convolved, dt = projected.split(sizes.projection, dim=-1)
        if factors is not None:
            dt = dt * factors.steps
        convolved = self.causal_conv(convolved, *conv, conv_state, rows, silu=True)
        x, keys, queries = convolved.split(sizes.convolved, dim=-1)
        y = self.ssd_scan(
            x.unflatten(-1, (sizes.num_heads, sizes.head_dim)),
            dt,
            keys.unflatten(-1, (sizes.num_groups, sizes.state_size)),
            queries.unflatten(-1, (sizes.num_groups, sizes.state_size)),
            weights,
            state,
            rows,
        ).flatten(-2)
        gate_factor, _, out_factor = factors or (1.0, 1.0, 1.0)
        if norm is None:
            return self.silu_gate(y, gate, gate_factor, out_factor)
        return self.gated_rms_norm(
            y, gate if factors is None else gate * gate_factor, norm.weight, norm.eps,
            group_size=sizes.inner // sizes.num_groups, gate_first=norm.gate_first,
        )  # fmt: skip

    def silu_gate(
        self, x: torch.Tensor, gate: torch.Tensor, gate_factor: float, out_factor: float
    ) -> torch.Tensor:
        """x * silu(gate_factor * gate) * out_factor, [T, size] each."""
        return (x.float() * F.silu(gate.float() * gate_factor) * out_factor).to(x.dtype)

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        gate: torch.Tensor,
        weights: ScanWeights,
        state: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        """Mamba's recurrence: S[i, n] = exp(dt[i] a[i, n]) S[i, n] + dt[i] x[i] b[n],
        y = (S c + d x) silu(gate), with dt the step size of `weights`.

        x, dt, gate: [T, I]; b, c: [T, N]; state: [num_states, I, N]; all but state may be views of
        wider tensors → [T, I]
        """
        values = x.float()
        y = _scan(
            selective_step, selective_tokens, (values, weights.step_size(dt)), (weights.a,),
            (b.float(), c.float()), state, rows,
        )  # fmt: skip
        return ((y + weights.d * values) * F.silu(gate.float())).to(x.dtype)

    def delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step: torch.Tensor,
        beta: torch.Tensor,
        weights: DeltaWeights,
        state: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        """Gated delta rule: S = exp(rate softplus(step + bias)) S, S += k (sigmoid(beta) (v -
        Sᵀ k))ᵀ, y = Sᵀ q / sqrt(K), with queries and keys first divided by their lengths.

        q, k: [T, G, K], each for H / G heads; v: [T, H, V]; step, beta: [T, H]; state: [num_states,
        H, K, V]; all but state may be views of wider tensors → [T, H, V]
        """
        each = v.shape[1] // q.shape[1]
        decay = weights.rate * F.softplus(step.float() + weights.dt_bias)
        queries, keys = (unit(part).repeat_interleave(each, dim=1) for part in (q, k))
        y = _scan(
            delta_step, delta_tokens,
            (queries * q.shape[2] ** -0.5, keys, v.float(), decay, torch.sigmoid(beta.float())),
            (), (), state, rows,
        )  # fmt: skip
        return y.to(v.dtype)

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
        """A gated delta net between its projections: `causal_conv` with silu, `delta_rule` of its
        outputs, and `gated_rms_norm` of each head, the gate behind the norm.

        projected: [T, widths of `sizes.projection`], last stride 1; kernel: [C, K inputs]; norm:
        [value_dim]; conv_state: [num_states, K - 1, C], state: [num_states, H, key_dim, value_dim],
        contiguous → [T, H * value_dim]
        """
        qkv, gate, beta, step = projected.split(sizes.projection, dim=-1)
        qkv = self.causal_conv(qkv, kernel, None, conv_state, rows, silu=True)
        query, key, value = qkv.split([sizes.keys, sizes.keys, sizes.values], dim=-1)
        by_key = (sizes.num_key_heads, sizes.key_dim)
        y = self.delta_rule(
            query.unflatten(-1, by_key), key.unflatten(-1, by_key),
            value.unflatten(-1, (sizes.num_value_heads, sizes.value_dim)), step, beta, weights,
            state, rows,
        ).flatten(-2)  # fmt: skip
        return self.gated_rms_norm(y, gate, norm, eps, group_size=sizes.value_dim, gate_first=False)

    def channel_delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step: torch.Tensor,
        beta: torch.Tensor,
        weights: ChannelDeltaWeights,
        state: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        """As `delta_rule`, but that each channel of keys decays by its own number, that of
        `weights`: S[k] = exp(decay[k]) S[k], …, and that of beta's sigmoid there is a factor.

        q, k, step: [T, H, K]; v: [T, H, V]; beta: [T, H]; state: [num_states, H, K, V]; all but
        state may be views of wider tensors → [T, H, V]
        """
        queries, keys = unit(q) * q.shape[2] ** -0.5, unit(k)
        y = _scan(
            delta_step, delta_tokens,
            (
                queries, keys, v.float(), weights.decay(step),
                weights.strength * torch.sigmoid(beta.float()),
            ),
            (), (), state, rows,
        )  # fmt: skip
        return y.to(v.dtype)

    def gated_rms_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        group_size: int,
        gate_first: bool,
        sigmoid: bool = False,
    ) -> torch.Tensor:
        """x / rms(x) * weight over each group of channels, times silu(gate) before or after.

        x, gate: [T, size]; weight: [size], or [group_size] for all groups alike; group_size:
        divides size; sigmoid: times sigmoid(gate), rounded once. Only models that have it pass it
        (`features`) → [T, size]
        """
        if sigmoid:
            assert not gate_first, "this gate is behind its norm"
            groups = x.float().unflatten(-1, (-1, group_size))
            groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
            normed = (groups * weight.float().view(-1, group_size)).flatten(-2)
            return (normed * torch.sigmoid(gate.float())).to(x.dtype)
        factor = F.silu(gate.float())
        wide = x.float() * factor if gate_first else x.float()
        groups = wide.unflatten(-1, (-1, group_size))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
        # Rounded before the weight, as models were trained.
        normed = weight.view(-1, group_size) * groups.to(x.dtype)
        out = normed.flatten(-2)
        return (out if gate_first else out.float() * factor).to(x.dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    """[..., size] → x / |x|, float32"""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def _scan(
    step: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    tokens: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    first: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    last: tuple[torch.Tensor, ...],
    state: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Compute a recurrence: one-token rows together by `step`, others by `tokens`.

    first, last: [T, ...] inputs before and after `weights` in the arguments
    """
    alone, at = rows.single()
    y, states = step(
        *(part[at] for part in first), *weights, *(part[at] for part in last),
        rows.states(state, alone).float(),
    )  # fmt: skip
    state[rows.slots[alone].long()] = states.to(state.dtype)
    if isinstance(at, slice):
        return y
    out = y.new_empty(rows.num_tokens, *y.shape[1:])
    out[at] = y
    for row, start, end in rows.longer():
        part, each = slice(start, end), slice(row, row + 1)
        y, after = tokens(
            *(value[part] for value in first), *weights, *(value[part] for value in last),
            rows.states(state, each)[0].float(),
        )  # fmt: skip
        out[part] = y
        state[rows.slots[each].long()] = after[None].to(state.dtype)
    return out

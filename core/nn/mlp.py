"""MLPs: gated, down(activation(gate(x)) * up(x)), and plain, down(activation(up(x)))."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import ConfigError
from .activations import ClampedSwiGLU, LimitedSwiGLU, activation_named
from .context import BuildContext
from .linear import GatedLinear, Linear, MergedLinear


class GatedMLP(nn.Module):
    """Gate and up in one product; silu is a part of that product, gelu comes after it."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        build: BuildContext,
        *,
        bias: bool = False,
        down_bias: bool | None = None,
        whole: bool = False,
        clamped: ClampedSwiGLU | LimitedSwiGLU | None = None,
        field: str = "hidden_act",
    ) -> None:
        """`down_bias`: of the last layer, if not as the others; `whole`: the checkpoint has gate
        and up as one tensor; `clamped`: in place of silu(gate)
        * up; `field`: the configuration's field that names the activation."""
        super().__init__()
        self.operations, self.ranks = build.operations, build.ranks
        self.gelu = activation == "gelu_pytorch_tanh"
        self.gate_up_proj: MergedLinear
        own = build.inner_share(intermediate_size)
        self.clamped = clamped
        if activation in ("silu", "swish") and clamped is None:
            self.gate_up_proj = GatedLinear(
                hidden_size, intermediate_size, build, bias=bias, whole=whole, shard="out",
                share=own,
            )  # fmt: skip
        elif (self.gelu or clamped is not None) and not whole:
            sizes = {"gate": intermediate_size, "up": intermediate_size}
            self.gate_up_proj = MergedLinear(
                hidden_size, sizes, build, bias=bias, shard="out", shares=dict.fromkeys(sizes, own)
            )
        else:
            raise ConfigError(f"{field}: {activation!r} is not supported", param=field)
        self.down_proj = Linear(
            intermediate_size, hidden_size, build, bias=bias if down_bias is None else down_bias,
            shard="in", share=own,
        )  # fmt: skip

    def forward(
        self, hidden: torch.Tensor, norm: nn.Module | None = None, *, add: bool = True
    ) -> torch.Tensor:
        """hidden + mlp(norm(hidden)), or with `add` False the second term alone: [num_tokens,
        hidden_size] → the same shape."""
        return self.project(self.inner(hidden, norm), hidden if add else None)

    def project(self, inner: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """residual + down(inner): [num_tokens, intermediate_size] → [num_tokens, hidden_size]"""
        return self.ranks.add(residual, (self.down_proj, inner))

    def inner(self, hidden: torch.Tensor, norm: nn.Module | None = None) -> torch.Tensor:
        """activation(gate) * up of norm(hidden): → [num_tokens, intermediate_size]"""
        inner: torch.Tensor = self.gate_up_proj(hidden, norm=norm)
        if self.clamped is not None:
            return self.operations.pointwise(self.clamped.__call__, *inner.chunk(2, dim=-1))
        return self.operations.gelu_mul(inner) if self.gelu else inner


class PlainMLP(nn.Module):
    """down(activation(up(x))), without a gate: encoders, and decoders such as GPT-NeoX and Phi."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        build: BuildContext,
        *,
        bias: bool = True,
        field: str = "hidden_act",
    ) -> None:
        """`field`: the configuration's field that names the activation."""
        super().__init__()
        self.activation: Callable[[torch.Tensor], torch.Tensor] = activation_named(
            activation, field=field
        )
        self.fused_activation: str | None = activation
        """Its name, for a product that applies it; None: it is no such function."""
        self.operations, self.ranks = build.operations, build.ranks
        own = build.inner_share(intermediate_size)
        self.up_proj = Linear(
            hidden_size, intermediate_size, build, bias=bias, shard="out", share=own
        )
        self.down_proj = Linear(
            intermediate_size, hidden_size, build, bias=bias, shard="in", share=own
        )

    def forward(self, hidden: torch.Tensor, norm: nn.Module | None = None) -> torch.Tensor:
        """hidden + mlp(norm(hidden)): [num_tokens, hidden_size] → the same shape."""
        return self.project(self.inner(hidden, norm), hidden)

    def project(self, inner: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """residual + down(inner): [num_tokens, intermediate_size] → [num_tokens, hidden_size]"""
        return self.ranks.add(residual, (self.down_proj, inner))

    def inner(self, hidden: torch.Tensor, norm: nn.Module | None = None) -> torch.Tensor:
        """activation(up(norm(hidden))): → [num_tokens, intermediate_size]"""
        up: nn.Module = self.up_proj  # Quantized, it is another class.
        if isinstance(up, Linear) and self.fused_activation is not None:
            return up.activated(hidden, self.fused_activation, norm=norm)
        return self.operations.pointwise(self.activation, up(hidden, norm=norm))

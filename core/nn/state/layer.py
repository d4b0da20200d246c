"""Layers that keep a state of each sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...cache.groups import CachePart, StateCache
from ...parallel.ranks import Product, Ranks
from ...parallel.sharding import Sharding
from ..context import BuildContext, ForwardContext


class StateLayer(nn.Module):
    """A layer with a state of each sequence, in the tensors that the worker binds."""

    cache: StateCache
    """What it keeps of each sequence."""

    def __init__(self, **parts: tuple[tuple[int, ...], torch.dtype]) -> None:
        """parts: name → shape for one sequence, dtype."""
        super().__init__()
        self.cache = StateCache(tuple(
            CachePart(name, shape, str(dtype).removeprefix("torch."))
            for name, (shape, dtype) in parts.items()
        ))  # fmt: skip
        self._states: Mapping[str, torch.Tensor] = {}

    def bind(self, states: Mapping[str, torch.Tensor]) -> None:
        """Use these states: the parts of `cache` by name, each [num_states, *shape]."""
        self._states = states

    def state(self, name: str) -> torch.Tensor:
        """Return a part, [num_states, *shape]."""
        assert self._states, "the worker binds the states before the first step"
        return self._states[name]


class StateMixer(StateLayer):
    """A layer with states that stands where others have attention."""

    ranks: Ranks
    """Those that hold a part of the layer each."""

    def forward(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Any,
        context: ForwardContext,
        *,
        add: bool = True,
    ) -> torch.Tensor:
        """hidden + mixer(norm(hidden)), or with `add` False the second term alone: [num_tokens,
        hidden_size] → the same shape. `rotary` is not used."""
        return self.ranks.add(hidden if add else None, self.mix(hidden, norm, context))

    def mix(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: ForwardContext
    ) -> tuple[Product, torch.Tensor]:
        """Return the last projection, and its input for norm(hidden): [num_tokens, hidden_size] →
        [num_tokens, width]."""
        raise NotImplementedError


class CausalConv(nn.Module):
    """Weights of a convolution of each channel over a sequence's tokens."""

    def __init__(self, channels: int, size: int, build: BuildContext, *, bias: bool) -> None:
        """size: inputs that an output sees"""
        super().__init__()
        self.weight = nn.Parameter(build.empty(channels, 1, size))
        self.bias = nn.Parameter(build.empty(channels)) if bias else None

    @property
    def kernel(self) -> torch.Tensor:
        """[channels, size]"""
        return self.weight[:, 0]


class MergedConv(CausalConv):
    """Convolutions side by side, whose weights checkpoints have apart."""

    def __init__(
        self,
        channels: Mapping[str, int],
        shares: Mapping[str, slice],
        size: int,
        build: BuildContext,
    ) -> None:
        """channels: name → those of all ranks; shares: name → this rank's"""
        count = sum(share.stop - share.start for share in shares.values())
        super().__init__(count, size, build, bias=False)
        self.shards: dict[str, slice] = {}
        self.shardings: dict[str, Sharding] = {}
        start = 0
        for name, share in shares.items():
            self.shards[name] = slice(start, start + share.stop - share.start)
            start = self.shards[name].stop
        if build.ranks.tensor.size > 1:
            own = {name: (share,) for name, share in shares.items()}
            self.shardings["weight"] = Sharding(0, channels, own)


class GateNorm(nn.Module):
    """The weight of `Operations.gated_rms_norm`."""

    def __init__(self, size: int, build: BuildContext) -> None:
        super().__init__()
        self.weight = nn.Parameter(build.empty(size))

"""Kernels over states: Qwen3-Next's gated delta rule, Falcon Mamba 7B's scan, Mamba 2 2.7B's
recurrence, and fused decode steps of the first and last.

Operations are those of chunks of 64 tokens. Mamba's scan is bound by an exponential per element of
x and state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from ....core.nn.state.rows import StateRows
from ....kernels.state.delta_net_step import delta_net_step
from ....kernels.state.delta_rule import delta_rule
from ....kernels.state.mamba2_step import mamba2_step
from ....kernels.state.selective_scan import selective_scan
from ....kernels.state.ssd_scan import ssd_scan
from .case import Case, Work

CHUNK = 64
TAPS = 4
ANY_STEP = (0.0, float("inf"))


class Delta(NamedTuple):
    heads: int
    groups: int
    keys: int
    values: int


class Mamba2(NamedTuple):
    heads: int
    groups: int
    width: int
    states: int


class Mamba(NamedTuple):
    channels: int
    states: int


class StateSizes(NamedTuple):
    """Layers, and their batches: (rows, tokens of each)."""

    delta: Delta
    mamba: Mamba
    mamba2: Mamba2
    batches: tuple[tuple[int, int], ...]


PUBLISHED = StateSizes(
    Delta(32, 16, 128, 128), Mamba(8192, 16), Mamba2(80, 1, 64, 128),
    ((1, 1), (64, 1), (256, 1), (1, 512), (1, 8192), (8, 1024)),
)  # fmt: skip
TINY_STATES = StateSizes(
    Delta(2, 1, 16, 16), Mamba(32, 4), Mamba2(2, 1, 16, 16), ((1, 1), (3, 1), (2, 17))
)


def state_cases(sizes: StateSizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for rows, tokens in sizes.batches:
        maker = _Maker(rows, tokens, device, dtype)
        yield maker.delta(sizes.delta)
        yield maker.mamba(sizes.mamba)
        yield maker.mamba2(sizes.mamba2)
        if tokens == 1:
            yield maker.delta_net_step(sizes.delta)
            yield maker.mamba2_step(sizes.mamba2)


class _Maker:
    """Prompts begin their sequences; rows of one token continue them."""

    def __init__(self, rows: int, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.num_rows, self.tokens, self.device, self.dtype = rows, tokens, device, dtype
        self.total = rows * tokens
        self.shape = f"{rows} rows of {tokens}"

    def rows(self) -> StateRows:
        starts = np.arange(self.num_rows + 1, dtype=np.int32) * self.tokens
        length = self.tokens if self.tokens > 1 else 100
        lengths = torch.full((self.num_rows,), length, dtype=torch.int32, device=self.device)
        slots = torch.arange(self.num_rows, device=self.device)
        on_device = torch.from_numpy(starts).to(self.device)
        return StateRows(self.total, slots, on_device, lengths, starts, max_query_len=self.tokens)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.total, *shape, device=self.device, dtype=self.dtype)

    def wide(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device)

    def case(
        self, kernel: str, state: int, elements: int, make: Callable[[], Work], flops: float
    ) -> Case:
        """state: numbers in a row's state; elements: a token's inputs and outputs."""
        times = 2 if self.tokens == 1 else 1
        moved = self.total * elements * self.dtype.itemsize + 4 * times * self.num_rows * state
        return Case(kernel, self.shape, moved, make, flops * self.total)

    def delta(self, layer: Delta) -> Case:
        heads, groups, keys, values = layer

        def make() -> Work:
            q, k, v = (
                self.random(groups, keys),
                self.random(groups, keys),
                self.random(heads, values),
            )
            step, beta = self.random(heads), self.random(heads)
            rate, bias = -self.wide(heads).abs(), self.wide(heads)
            state = self.wide(self.num_rows, heads, keys, values)
            rows = self.rows()
            return lambda: delta_rule(q, k, v, step, beta, (rate, bias), state, rows)

        chunk = 0 if self.tokens == 1 else CHUNK
        flops = 2.0 * heads * (3 * keys * values + chunk * (3 * keys + 2 * values))
        elements = 2 * groups * keys + 2 * heads * values + 2 * heads
        return self.case("delta_rule", heads * keys * values, elements, make, flops)

    def mamba(self, layer: Mamba) -> Case:
        channels, states = layer

        def make() -> Work:
            x, dt, gate = (self.random(channels) for _ in range(3))
            b, c = self.random(states), self.random(states)
            rates, (d, bias) = -self.wide(channels, states).abs(), self.wide(2, channels)
            weights = (rates, d, bias, ANY_STEP)
            state = self.wide(self.num_rows, channels, states)
            rows = self.rows()
            return lambda: selective_scan(x, dt, b, c, gate, weights, state, rows)

        elements = 4 * channels + 2 * states
        return self.case("selective_scan", channels * states, elements, make, 0.0)

    def mamba2(self, layer: Mamba2) -> Case:
        heads, groups, width, states = layer

        def make() -> Work:
            x, dt = self.random(heads, width), self.random(heads)
            b, c = self.random(groups, states), self.random(groups, states)
            weights = (-self.wide(heads).abs(), *self.wide(2, heads), ANY_STEP)
            state = self.wide(self.num_rows, heads, width, states)
            rows = self.rows()
            return lambda: ssd_scan(x, dt, b, c, weights, state, rows)

        chunk = 0 if self.tokens == 1 else CHUNK
        flops = 2.0 * heads * (2 * width * states + chunk * (states + width))
        elements = 2 * heads * width + 2 * groups * states + heads
        return self.case("ssd_scan", heads * width * states, elements, make, flops)

    def delta_net_step(self, layer: Delta) -> Case:
        heads, groups, keys, values = layer
        channels = 2 * groups * keys + heads * values

        def make() -> Work:
            projected = self.random(channels + heads * values + 2 * heads)
            weight = self.wide(channels, TAPS).to(self.dtype)
            norm = self.wide(values).to(self.dtype)
            rate, bias = -self.wide(heads).abs(), self.wide(heads)
            inputs = self.wide(self.num_rows, TAPS - 1, channels).to(self.dtype)
            state = self.wide(self.num_rows, heads, keys, values)
            rows, counters = self.rows(), self.counters(groups)
            return lambda: delta_net_step(
                projected, weight, inputs, rate, bias, norm, 1e-6, state, rows, counters,
                groups=groups,
            )  # fmt: skip

        elements = (2 * TAPS - 1) * channels + 2 * heads * values + 2 * heads
        return self.case("delta_net_step", heads * keys * values, elements, make, 0.0)

    def mamba2_step(self, layer: Mamba2) -> Case:
        heads, groups, width, states = layer
        channels = heads * width + 2 * groups * states

        def make() -> Work:
            projected = self.random(heads * width + channels + heads)
            weight = self.wide(channels, TAPS).to(self.dtype)
            bias = self.wide(channels).to(self.dtype)
            a, d, dt_bias = -self.wide(heads).abs(), self.wide(heads), self.wide(heads)
            inputs = self.wide(self.num_rows, TAPS - 1, channels).to(self.dtype)
            state = self.wide(self.num_rows, heads, width, states)
            rows, counters = self.rows(), self.counters(groups)
            return lambda: mamba2_step(
                projected, weight, bias, inputs, a, d, dt_bias, ANY_STEP, state, rows, counters,
                groups=groups,
            )  # fmt: skip

        elements = (2 * TAPS - 1) * channels + 2 * heads * width + heads
        return self.case("mamba2_step", heads * width * states, elements, make, 0.0)

    def counters(self, groups: int) -> torch.Tensor:
        return torch.zeros(self.num_rows * groups, dtype=torch.int32, device=self.device)

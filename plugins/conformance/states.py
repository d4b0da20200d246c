"""Checks of operations on states, for `OperationsKit`: results, and the states that they leave.

Steps have rows of one token and of many, some of which continue a state. States of other slots must
stay as they are, and what is left in the slot of a row that begins must not matter: it is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from ...core.nn.state.operations import (
    ChannelDeltaWeights,
    ConvWeights,
    DeltaWeights,
    GatedNorm,
    Mamba2Factors,
    ScanWeights,
)
from ...core.nn.state.rows import StateRows
from ...core.nn.state.sizes import DeltaSizes, Mamba2Sizes
from .operation_arguments import REFERENCE

NUM_STATES = 8
SLOTS = (5, 0, 3, 6, 1, 2)
STEPS = {
    "decode": ((5, 1), (1, 1), (9, 1)),
    "prompts": ((1, 1), (6, 1), (2, 2), (71, 71), (40, 21), (9, 4)),
}
"""(tokens of the sequence, those of the step) of each row."""
EMPTY = 2
"""Rows without tokens that a recorded step has at its end, of the last slot."""


def make_rows(
    sizes: Sequence[tuple[int, int]], device: torch.device, *, mixed: bool = False
) -> StateRows:
    """Return the rows of a step; mixed: as a recorded step has them, with room for more."""
    slots = list(SLOTS[: len(sizes)])
    if mixed:
        sizes = [*sizes, *[(0, 0)] * EMPTY]
        slots += [NUM_STATES - 1] * EMPTY
    starts = np.cumsum([0, *(count for _, count in sizes)]).astype(np.int32)
    return StateRows(
        num_tokens=int(starts[-1]),
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
        query_start=torch.from_numpy(starts.copy()).to(device),
        seq_lens=torch.tensor([length for length, _ in sizes], dtype=torch.int32, device=device),
        query_start_cpu=np.zeros_like(starts) if mixed else starts,
        max_query_len=int(starts[-1]) if mixed else int(np.diff(starts).max()),
        mixed=mixed,
    )


class StateChecks:
    """Part of `OperationsKit`."""

    device: Any
    draw: Any
    make: Any
    near: Any
    tolerance: ClassVar[Any]

    def _sliced(self, tokens: int, *shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        """[tokens, *shape]: a slice of a wider tensor, as projections return it."""
        size = int(np.prod(shape))
        wider: torch.Tensor = self.draw(tokens, size + 6, dtype=dtype, seed=seed, scale=0.5)
        return wider[:, 3 : 3 + size].view(tokens, *shape)

    def _check_states(
        self,
        name: str,
        dtype: torch.dtype,
        step: str,
        shapes: Sequence[tuple[int, ...]],
        weights: Sequence[Any],
        state: torch.Tensor,
        **more: Any,
    ) -> None:
        """Compare an operation with the reference, for one token."""
        operations = self.make(dtype)
        rows = make_rows(STEPS[step], self.device)
        inputs = [
            self._sliced(rows.num_tokens, *shape, dtype=dtype, seed=seed)
            for seed, shape in enumerate(shapes)
        ]
        begins = rows.slots[rows.begins].long()
        state[begins] = float("nan")
        want_state = state.clone()
        want = getattr(REFERENCE, name)(*inputs, *weights, want_state, rows, **more)
        kinds = [rows]
        if operations.mixed_states and step != "decode":
            kinds.append(make_rows(STEPS[step], self.device, mixed=True))
        for each in kinds:
            got_state = state.clone()
            got = getattr(operations, name)(*inputs, *weights, got_state, each, **more)
            assert got.dtype == dtype
            self.near(got, want, dtype)
            used = rows.slots.long()
            least = max(dtype, state.dtype, key=lambda kind: self.tolerance[kind])
            self.near(got_state[used], want_state[used], least)
            others = [slot for slot in range(NUM_STATES - 1) if slot not in rows.slots.tolist()]
            assert torch.equal(got_state[others], state[others]), "another slot's state changed"

    @pytest.mark.parametrize("step", STEPS)
    def test_convolutions_continue_states(self, dtype: torch.dtype, step: str) -> None:
        channels = 150
        for kernel, bias, silu in ((4, True, True), (3, False, False)):
            weights = [
                self.draw(channels, kernel, dtype=dtype, scale=0.5),
                self.draw(channels, dtype=dtype, seed=1) if bias else None,
            ]
            state = self.draw(NUM_STATES, kernel - 1, channels, dtype=dtype, seed=2)
            self._check_states("causal_conv", dtype, step, [(channels,)], weights, state, silu=silu)

    def _rates(self, *shape: int) -> torch.Tensor:
        rates: torch.Tensor = -self.draw(*shape, dtype=torch.float32).abs()
        return rates

    @pytest.mark.parametrize("step", STEPS)
    def test_ssd_scans_continue_states(self, dtype: torch.dtype, step: str) -> None:
        heads, groups, width, size = 4, 2, 24, 20
        skip, bias = (self.draw(heads, dtype=torch.float32, seed=seed) for seed in (1, 2))
        weights = ScanWeights(self._rates(heads), skip, bias, (0.1, 1.5))
        shapes = [(heads, width), (heads,), (groups, size), (groups, size)]
        state = self.draw(NUM_STATES, heads, width, size, dtype=torch.float32)
        self._check_states("ssd_scan", dtype, step, shapes, [weights], state)

    @pytest.mark.parametrize("gate_first", [None, True, False])
    def test_layers_of_mamba_2_continue_states(
        self, dtype: torch.dtype, gate_first: bool | None
    ) -> None:
        """Two decode steps: what the first leaves is read. gate_first: None: there is no norm."""
        groups, width = (1, 40) if gate_first is None else (2, 16)
        factors = Mamba2Factors(0.7, 1.2, 1.3)
        sizes = Mamba2Sizes(0, 4, width, 20, groups, 4)
        _, channels, heads = sizes.projection
        skip, bias = (self.draw(heads, dtype=torch.float32, seed=seed) for seed in (1, 2))
        weights = ScanWeights(self._rates(heads), skip, bias, (0.1, 1.5))
        conv = ConvWeights(
            self.draw(channels, 4, dtype=dtype, scale=0.5),
            None if gate_first else self.draw(channels, dtype=dtype, seed=1),
        )
        norm = None
        if gate_first is not None:
            norm = GatedNorm(self.draw(4 * width, dtype=dtype, seed=7), 0.1, gate_first)
        states = (
            self.draw(NUM_STATES, 3, channels, dtype=dtype, seed=3),
            self.draw(NUM_STATES, heads, width, 20, dtype=torch.float32, seed=4),
        )

        def run(each: Any, projected: torch.Tensor, kept: Any, rows: StateRows) -> Any:
            return each.mamba2(
                projected, conv, weights, sizes, *kept, rows, norm=norm, factors=factors
            )

        self._check_steps(dtype, sum(sizes.projection), states, run)

    def test_gated_delta_nets_continue_states(self, dtype: torch.dtype) -> None:
        """As those of Mamba 2."""
        sizes = DeltaSizes(0, 2, 4, 12, 20, 4)
        channels, _, heads, _ = sizes.projection
        weights = DeltaWeights(self._rates(heads), self.draw(heads, dtype=torch.float32, seed=1))
        kernel = self.draw(channels, 4, dtype=dtype, scale=0.5)
        norm = self.draw(20, dtype=dtype, seed=2)
        states = (
            self.draw(NUM_STATES, 3, channels, dtype=dtype, seed=3),
            self.draw(NUM_STATES, heads, 12, 20, dtype=torch.float32, seed=4),
        )

        def run(each: Any, projected: torch.Tensor, kept: Any, rows: StateRows) -> Any:
            return each.delta_net(projected, kernel, weights, norm, 0.1, sizes, *kept, rows)

        self._check_steps(dtype, sum(sizes.projection), states, run)

    def _check_steps(
        self,
        dtype: torch.dtype,
        width: int,
        states: tuple[torch.Tensor, ...],
        run: Callable[..., torch.Tensor],
    ) -> None:
        """Compare two consecutive decode steps with the reference. run: (operations, [T, width],
        states, rows) → result; it may overwrite its input.
        """
        operations, rows = self.make(dtype), make_rows(STEPS["decode"], self.device)
        for state in states:
            state[rows.slots[rows.begins].long()] = float("nan")
        got, want = (tuple(state.clone() for state in states) for _ in range(2))
        for seed in (5, 6):
            projected = self._sliced(rows.num_tokens, width, dtype=dtype, seed=seed)
            results = [
                run(each, projected.clone(), kept, rows)
                for each, kept in ((operations, got), (REFERENCE, want))
            ]
            self.near(*results, dtype)
        used = rows.slots.long()
        others = [slot for slot in range(NUM_STATES) if slot not in rows.slots.tolist()]
        for before, one, other in zip(states, got, want, strict=True):
            self.near(one[used], other[used], dtype)
            assert torch.equal(one[others], before[others]), "another slot's state changed"

    @pytest.mark.parametrize("step", STEPS)
    def test_selective_scans_continue_states(self, dtype: torch.dtype, step: str) -> None:
        channels, size = 40, 6
        skip, bias = (self.draw(channels, dtype=torch.float32, seed=seed) for seed in (1, 2))
        weights = ScanWeights(self._rates(channels, size), skip, bias)
        shapes = [(channels,), (channels,), (size,), (size,), (channels,)]
        state = self.draw(NUM_STATES, channels, size, dtype=torch.float32)
        self._check_states("selective_scan", dtype, step, shapes, [weights], state)

    @pytest.mark.parametrize("step", STEPS)
    def test_delta_rules_continue_states(self, dtype: torch.dtype, step: str) -> None:
        heads, groups, keys, values = 4, 2, 12, 20
        weights = DeltaWeights(self._rates(heads), self.draw(heads, dtype=torch.float32, seed=1))
        shapes = [(groups, keys), (groups, keys), (heads, values), (heads,), (heads,)]
        state = self.draw(NUM_STATES, heads, keys, values, dtype=torch.float32)
        self._check_states("delta_rule", dtype, step, shapes, [weights], state)

    @pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
    def test_states_of_16_bits_continue(self, dtype: torch.dtype, stored: torch.dtype) -> None:
        """Read, and rounded where the step leaves them; what is between is as exact as ever."""
        heads, size = 2, 16
        skip, bias = (self.draw(heads, dtype=torch.float32, seed=seed) for seed in (1, 2))
        scan = ScanWeights(self._rates(heads), skip, bias)
        channel = ScanWeights(self._rates(heads, size), skip, bias)
        convolution = [self.draw(heads, 4, dtype=dtype, scale=0.5), None]
        vectors, numbers = (heads, size), (heads,)
        cases: list[tuple[str, list[tuple[int, ...]], list[Any], tuple[int, ...]]] = [
            ("ssd_scan", [vectors, numbers, vectors, vectors], [scan], (heads, size, size)),
            (
                "selective_scan", [numbers, numbers, (size,), (size,), numbers], [channel],
                (heads, size),
            ),
            (
                "delta_rule", [vectors, vectors, vectors, numbers, numbers],
                [DeltaWeights(scan.a, bias)], (heads, size, size),
            ),
        ]  # fmt: skip
        for name, shapes, weights, shape in cases:
            state = self.draw(NUM_STATES, *shape, dtype=stored)
            self._check_states(name, dtype, "prompts", shapes, weights, state)
        state = self.draw(NUM_STATES, 3, heads, dtype=stored)
        self._check_states("causal_conv", dtype, "decode", [numbers], convolution, state, silu=True)

    @pytest.mark.parametrize("bound", [None, -5.0])
    @pytest.mark.parametrize("step", STEPS)
    def test_channel_delta_rules_continue_states(
        self, dtype: torch.dtype, step: str, bound: float | None
    ) -> None:
        heads, keys, values = 3, 12, 20
        bias = self.draw(heads, keys, dtype=torch.float32, seed=1)
        weights = ChannelDeltaWeights(self._rates(heads), bias, bound)
        shapes = [(heads, keys), (heads, keys), (heads, values), (heads, keys), (heads,)]
        state = self.draw(NUM_STATES, heads, keys, values, dtype=torch.float32)
        self._check_states("channel_delta_rule", dtype, step, shapes, [weights], state)

    def test_norms_gated_by_sigmoids(self, dtype: torch.dtype) -> None:
        operations = self.make(dtype)
        if "gated_rms_norm.sigmoid" not in operations.features:
            pytest.skip("these operations have no such gates")
        x, gate = (self._sliced(5, 96, dtype=dtype, seed=seed) for seed in (1, 2))
        weight = self.draw(24, dtype=dtype, seed=3)
        got, want = (
            each.gated_rms_norm(x, gate, weight, 0.1, group_size=24, gate_first=False, sigmoid=True)
            for each in (operations, REFERENCE)
        )
        self.near(got, want, dtype)

    @pytest.mark.parametrize("gate_first", [True, False])
    def test_gated_norms(self, dtype: torch.dtype, gate_first: bool) -> None:
        operations = self.make(dtype)
        x, gate = (self._sliced(5, 96, dtype=dtype, seed=seed) for seed in (1, 2))
        for group_size, size in ((96, 96), (24, 96), (12, 12)):
            weight = self.draw(size, dtype=dtype, seed=3)
            both = [
                each.gated_rms_norm(
                    x, gate, weight, 0.1, group_size=group_size, gate_first=gate_first
                )
                for each in (operations, REFERENCE)
            ]
            self.near(*both, dtype)

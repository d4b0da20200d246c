"""Token masks of structured rows: filled while the forward pass runs, sent before sampling.

The forward pass of step N + 1 is launched at once; only its sampling needs the tokens of step N,
for the grammars have to go on by them. So the launch thread waits for step N here, behind the
launch of step N + 1: the device has work meanwhile. Rows without a grammar never come here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..structured.constraint import Constraint
from ..types import SlotStart


class Sampled(Protocol):
    """A launched step whose tokens can be had."""

    def chosen_tokens(self) -> list[int]:
        """Blocks until the device is done; a token for each row that samples, -1 where none."""


@dataclass(frozen=True)
class TokenMask:
    """Which tokens some rows of a step may sample, on the device."""

    bits: torch.Tensor
    """[count, ceil(vocab_size / 32)] int32; bit i % 32 of word i // 32 is token i"""
    rows: torch.Tensor | None
    """[count] int64, indices into the logits' rows; None: all of them, in order"""


class GrammarMasks:
    """The constraints of the slots, and the steps whose tokens they have not seen."""

    def __init__(
        self,
        *,
        vocab_size: int,
        device: torch.device,
        mask_timeout: float,
    ) -> None:
        self._words = -(-vocab_size // 32)
        self._device = device
        self._mask_timeout = mask_timeout
        self._constraints: dict[int, Constraint] = {}
        self._unseen: deque[tuple[Sampled, list[tuple[int, Constraint]]]] = deque()

    def start(self, start: SlotStart) -> None:
        """A request takes a slot; one resumed after preemption is walked up to where it was."""
        self._constraints.pop(start.slot, None)
        if start.grammar is not None:
            self._constraints[start.slot] = Constraint(start, self._mask_timeout)

    def release(self, slot: int) -> None:
        """The slot's request ended or was preempted."""
        self._constraints.pop(slot, None)

    def rows(self, slots: Sequence[int]) -> list[tuple[int, Constraint]]:
        """Those of a step's sampling rows that have a grammar: index and constraint."""
        constraints = self._constraints
        if not constraints:
            self._unseen.clear()
            return []
        return [(row, constraints[slot]) for row, slot in enumerate(slots) if slot in constraints]

    def fill(self, rows: list[tuple[int, Constraint]], num_rows: int) -> TokenMask:
        """Wait for the tokens that the grammars have not seen, then say what may come next.

        rows: as `rows` gave them, of a step with `num_rows` sampling rows.
        """
        self._catch_up()
        on_gpu = self._device.type == "cuda"
        host = torch.empty((len(rows), self._words), dtype=torch.int32, pin_memory=on_gpu)
        bits = host.numpy()
        for place, (_, constraint) in enumerate(rows):
            constraint.fill(bits[place])
        index = None
        if len(rows) < num_rows:
            found = torch.tensor([row for row, _ in rows], dtype=torch.int64, pin_memory=on_gpu)
            index = found.to(self._device, non_blocking=True)
        return TokenMask(host.to(self._device, non_blocking=True), index)

    def failures(self, rows: list[tuple[int, Constraint]]) -> dict[int, str]:
        """Row → why its request cannot go on."""
        return {row: c.failure for row, c in rows if c.failure is not None}

    def sampled(self, step: Sampled, rows: list[tuple[int, Constraint]]) -> None:
        """The step that `fill` was for has been launched."""
        self._unseen.append((step, rows))

    def _catch_up(self) -> None:
        while self._unseen:
            step, rows = self._unseen.popleft()
            tokens = np.asarray(step.chosen_tokens())
            for row, constraint in rows:
                constraint.advance(int(tokens[row]))

"""Token masks of structured rows: filled during the forward pass.

Step N + 1's forward pass is launched at once; only its sampling needs step N's tokens, for the
grammars. So the launch thread waits for step N here, while the device works.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ...config import EngineConfig
from ...grammars.batch_masks import advance_all, batch_method, fill_masks
from ...grammars.constraint import ANY, Constraint, allows
from ...parallel.ranks import Group
from ...step import NOTHING_IN_PROCESS, InProcess, SlotStart
from ..packing import PackedUpload
from ..per_slot import PerSlot

FILL_THREADS = max(0, min(8, (os.cpu_count() or 1) // 2) - 1)
"""Threads that help to fill masks, outside the interpreter lock."""
SHARED_SECONDS = 1e-3
"""If a step's masks took longer, the next step's are shared among threads."""


class Sampled(Protocol):
    def kept_tokens(self) -> list[list[int]]:
        """Wait for the device; return the tokens of each sampling row, [-1] for none: several, if
        drafts were accepted.
        """

    def proposals(self) -> list[list[int]] | None:
        """Return the drafts proposed after each row's tokens; None: there are none."""


@dataclass(frozen=True)
class TokenMask:
    """Allowed tokens of some rows, on the device."""

    bits: torch.Tensor
    """[count, ceil(vocab_size / 32)] int32; token i is bit i % 32 of word i // 32"""
    rows: torch.Tensor | None
    """[count] int64 rows of logits; None: all, in order"""
    places: torch.Tensor
    """[num_rows] int64: index of each row's bits, or -1"""
    on_host: np.ndarray | None = None
    """As `places`; None: the mask is used as a whole."""

    def part(self, index: np.ndarray) -> TokenMask | None:
        """Return the mask of some rows of logits, in this order; None: none of them has any."""
        assert self.on_host is not None, "a mask that is not divided"
        places = self.on_host[index]
        rows = np.flatnonzero(places >= 0)
        if not rows.size:
            return None
        own = np.full(len(index), -1, dtype=np.int64)
        own[rows] = np.arange(len(rows))
        upload = PackedUpload(self.bits.device)
        for array in (rows.astype(np.int64), places[rows].astype(np.int64), own):
            upload.add(array)
        masked, which, device_places = upload.send()
        all_of_them = len(rows) == len(index)
        bits = self.bits.index_select(0, which)
        return TokenMask(bits, None if all_of_them else masked, device_places, own)


class Forced(NamedTuple):
    """Text that a grammar forces."""

    accepted: int
    """It comes if so many drafts of the row are accepted."""
    tokens: list[int]
    """Its first is the one that the row samples then; two or more."""


class GrammarMasks(PerSlot):
    """Tracks slots' constraints, and the steps whose tokens they lack."""

    def __init__(
        self,
        *,
        vocab_size: int,
        device: torch.device,
        mask_timeout: float,
        threads: int = FILL_THREADS,
    ) -> None:
        self._words = -(-vocab_size // 32)
        self._device = device
        self._mask_timeout = mask_timeout
        self._constraints: dict[int, Constraint] = {}
        self._unseen: deque[tuple[Sampled, list[tuple[int, Constraint]]]] = deque()
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._last_seconds = 0.0
        """Duration of the last step's masks."""
        self._apart = False
        """Whether the next step times each mask, as they took too long."""
        self.seeks_forced = False
        """Whether `take_forced` is called after each step."""
        self._forced: dict[int, Forced] = {}
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Start a request; a resumed grammar is advanced by the tokens so far. Raises RuntimeError
        without the grammar.
        """
        self._constraints.pop(start.slot, None)
        if start.grammar is None:
            return
        if (compiled := in_process.grammars.get(start.slot)) is None:
            raise RuntimeError(f"slot {start.slot}: its grammar is missing beside the plan")
        self._constraints[start.slot] = Constraint(start, compiled, self._mask_timeout)

    def release(self, slot: int) -> None:
        self._constraints.pop(slot, None)

    def forget_steps(self) -> None:
        """Drop the launched steps, from which no slot continues."""
        self._unseen.clear()

    def rows(self, slots: Sequence[int]) -> list[tuple[int, Constraint]]:
        """Return the sampling rows with a grammar: index and constraint."""
        constraints = self._constraints
        if not constraints:
            self._unseen.clear()
            return []
        return [(row, constraints[slot]) for row, slot in enumerate(slots) if slot in constraints]

    def fill(self, rows: list[tuple[int, Constraint]], num_rows: int) -> TokenMask:
        """Wait for missing tokens, then return the next tokens' masks.

        rows: from `rows`, of `num_rows` sampling rows.
        """
        self._catch_up()
        host = torch.empty(
            (len(rows), self._words), dtype=torch.int32, pin_memory=self._copies is not None
        )
        self._fill_rows([constraint for _, constraint in rows], host.numpy())
        for row, constraint in rows:
            self._note_forced(row, constraint, 0)
        return self._sent(host, [row for row, _ in rows], num_rows)

    def _note_forced(self, row: int, constraint: Constraint, accepted: int) -> None:
        """Note what must follow, while the constraint is after so many accepted drafts."""
        if self.seeks_forced and len(tokens := constraint.forced_tokens()) > 1:
            self._forced[row] = Forced(accepted, tokens)

    def take_forced(self) -> dict[int, Forced]:
        """Return what follows the last step's tokens, by sampling row, once."""
        forced, self._forced = self._forced, {}
        return forced

    def fill_along(
        self, rows: list[tuple[int, Constraint]], counts: Sequence[int]
    ) -> tuple[TokenMask, torch.Tensor]:
        """As `fill`, for rows with drafts: a mask for each position, given the drafts before it.

        counts: [S] drafts of each sampling row → the mask of all positions; [S] int32, how many
        drafts of each row may be accepted: those before one that the grammar forbids, or that
        cannot be followed
        """
        self._catch_up()
        widths = np.asarray(counts, dtype=np.int64) + 1
        firsts = np.cumsum(widths) - widths
        own = widths[[row for row, _ in rows]]
        begins = np.cumsum(own) - own
        """Each constrained row's first mask."""
        host = torch.full(
            (int(own.sum()), self._words), ANY, dtype=torch.int32,
            pin_memory=self._copies is not None,
        )  # fmt: skip
        limits = np.asarray(counts, dtype=np.int32).copy()
        self._walk(rows, host.numpy(), begins, limits)
        positions = np.repeat(firsts[[row for row, _ in rows]] - begins, own)
        positions += np.arange(len(positions))
        mask = self._sent(host, positions.tolist(), int(widths.sum()))
        upload = PackedUpload(self._device)
        upload.add(limits)
        return mask, upload.send()[0]

    def _walk(
        self,
        rows: list[tuple[int, Constraint]],
        bits: np.ndarray,
        begins: np.ndarray,
        limits: np.ndarray,
    ) -> None:
        """Fill the masks of all places, place by place, and lower `limits`; constraints stay where
        they are.

        bits: [masks, words] int32, row r's from begins[r] on
        """
        active = [(begin, *each) for begin, each in zip(begins.tolist(), rows, strict=True)]
        block = np.empty((len(active), self._words), dtype=np.int32)
        self._fill_rows([constraint for _, constraint in rows], block)
        bits[begins] = block
        marked: list[Constraint] = []
        place = 0
        while True:
            following: list[tuple[int, int, Constraint]] = []
            for begin, row, constraint in active:
                if place == limits[row]:
                    self._note_forced(row, constraint, place)
                    continue
                drafts = constraint.drafts
                follows = place < len(drafts) and allows(bits[begin + place], drafts[place])
                if follows and place == 0:
                    if follows := constraint.mark():
                        marked.append(constraint)
                if follows:
                    following.append((begin, row, constraint))
                else:
                    limits[row] = place
                    self._note_forced(row, constraint, place)
            if not following:
                break
            constraints = [constraint for *_, constraint in following]
            advance_all(constraints, [constraint.drafts[place] for constraint in constraints])
            place += 1
            block = np.empty((len(following), self._words), dtype=np.int32)
            self._fill_rows(constraints, block)
            active = []
            for number, (begin, row, constraint) in enumerate(following):
                bits[begin + place] = block[number]
                if constraint.failure is None:
                    active.append((begin, row, constraint))
                else:  # Its failure counts only if the drafts before it are the tokens.
                    limits[row] = place - 1
        for constraint in marked:
            constraint.go_back()

    def _fill_rows(self, constraints: Sequence[Constraint], bits: np.ndarray) -> None:
        """bits: [len(constraints), words] int32"""
        start = time.perf_counter()
        fill_bitmasks = None if self._apart else batch_method(constraints, "fill_bitmasks")
        if fill_bitmasks is not None:
            fill_masks(fill_bitmasks, constraints, bits)
            self._apart = time.perf_counter() - start > self._mask_timeout
            return
        self._apart = False
        pending = iter(list(zip(constraints, bits, strict=True)))  # Shared by the threads.
        helpers = 0
        if self._last_seconds > SHARED_SECONDS:
            helpers = min(self._threads, len(constraints) // 2)
        if helpers:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "jackfield-masks")
            shares = [self._pool.submit(_fill, pending) for _ in range(helpers)]
            _fill(pending)
            for share in shares:
                share.result()
        else:
            _fill(pending)
        self._last_seconds = (time.perf_counter() - start) * (1 + helpers)

    def _sent(self, host: torch.Tensor, rows: list[int], num_rows: int) -> TokenMask:
        """Copy the masks of these rows of logits during earlier launches."""
        count = host.shape[0]
        # Indices of rows with a mask, then the mask index of each row: one copy.
        on_host = np.full(count + num_rows, -1, dtype=np.int64)
        on_host[:count] = rows
        on_host[count:][on_host[:count]] = np.arange(count)
        index = torch.from_numpy(on_host)
        if self._copies is None:
            bits, places = host.to(self._device), index.to(self._device)
        else:
            index = index.pin_memory()
            main = torch.cuda.current_stream(self._device)
            with torch.cuda.stream(self._copies):
                bits = host.to(self._device, non_blocking=True)
                places = index.to(self._device, non_blocking=True)
            main.wait_stream(self._copies)
            for tensor in (bits, places):
                tensor.record_stream(main)
        all_of_them = count == num_rows
        masked = None if all_of_them else places[:count]
        return TokenMask(bits, masked, places[count:], on_host[count:])

    def unfollowed(self, slots: Sequence[int]) -> set[int]:
        """Return those of the slots whose grammars cannot take drafts back."""
        constraints = self._constraints
        return {slot for slot in slots if slot in constraints and not constraints[slot].goes_back}

    def failures(self, rows: list[tuple[int, Constraint]]) -> dict[int, str]:
        """Return row → reason to end its request."""
        return {row: c.failure for row, c in rows if c.failure is not None}

    def sampled(self, step: Sampled, rows: list[tuple[int, Constraint]]) -> None:
        """Note the launch of `fill`'s step."""
        self._unseen.append((step, rows))

    def _catch_up(self) -> None:
        while self._unseen:
            step, rows = self._unseen.popleft()
            tokens, proposals = step.kept_tokens(), step.proposals()
            advanced, place = rows, 0
            while advanced:
                ids = [tokens[row][place] for row, _ in advanced]
                advance_all([constraint for _, constraint in advanced], ids)
                place += 1
                advanced = [each for each in advanced if len(tokens[each[0]]) > place]
            for row, constraint in rows:
                constraint.drafts = () if proposals is None else proposals[row]


class SharedMasks(GrammarMasks):
    """Masks of several ranks: the first computes and sends them, as masks may depend on a time
    limit.
    """

    def __init__(
        self, group: Group, *, vocab_size: int, device: torch.device, mask_timeout: float
    ) -> None:
        super().__init__(vocab_size=vocab_size, device=device, mask_timeout=mask_timeout)
        self._group = group

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Only the first rank needs the grammar."""
        if self._group.rank == 0:
            super().start(start, in_process)
            return
        self.release(start.slot)
        if start.grammar is not None:
            placeholder: Any = _Elsewhere()
            self._constraints[start.slot] = placeholder

    def fill(self, rows: list[tuple[int, Constraint]], num_rows: int) -> TokenMask:
        mask = super().fill(rows, num_rows)
        return replace(mask, bits=self._group.all_reduce(mask.bits))

    def _note_forced(self, row: int, constraint: Constraint, accepted: int) -> None:
        if self._group.rank == 0:
            super()._note_forced(row, constraint, accepted)

    def sampled(self, step: Sampled, rows: list[tuple[int, Constraint]]) -> None:
        if self._group.rank == 0:
            super().sampled(step, rows)

    def fill_along(
        self, rows: list[tuple[int, Constraint]], counts: Sequence[int]
    ) -> tuple[TokenMask, torch.Tensor]:
        mask, limits = super().fill_along(rows, counts)
        bits = self._group.all_reduce(mask.bits)
        return replace(mask, bits=bits), self._group.all_reduce(limits)

    def _walk(
        self,
        rows: list[tuple[int, Constraint]],
        bits: np.ndarray,
        begins: np.ndarray,
        limits: np.ndarray,
    ) -> None:
        if self._group.rank == 0:
            super()._walk(rows, bits, begins, limits)
        else:
            bits.fill(0)
            limits.fill(0)

    def _fill_rows(self, constraints: Sequence[Constraint], bits: np.ndarray) -> None:
        if self._group.rank == 0:
            super()._fill_rows(constraints, bits)
        else:
            bits.fill(0)


def grammar_masks(
    group: Group, config: EngineConfig, vocab_size: int, device: torch.device
) -> GrammarMasks:
    timeout = config.structured_outputs_config.mask_timeout
    if group.size == 1:
        return GrammarMasks(vocab_size=vocab_size, device=device, mask_timeout=timeout)
    return SharedMasks(group, vocab_size=vocab_size, device=device, mask_timeout=timeout)


class _Elsewhere:
    """Stands for another rank's constraint."""

    failure: str | None = None
    failed_param: str | None = None
    goes_back = True


def _fill(todo: Iterator[tuple[Constraint, np.ndarray]]) -> None:
    for constraint, row in todo:
        constraint.fill(row)

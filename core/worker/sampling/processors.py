"""Plugged-in logits processors, by slot and row.

A processor's error is reported with its name, and ends its requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...config import EngineConfig
from ...protocols.logits_processors import LogitsProcessor, LogitsProcessorSetup, ProcessedRows
from ...registration.extra_args import KIND, active_processors
from ...registry import Plugins
from ...step import SlotStart

logger = logging.getLogger("jackfield.worker")


@dataclass
class _Active:
    who: str
    """For errors."""
    processor: LogitsProcessor
    slots: set[int] = field(default_factory=set)
    last_rows: tuple[int, ...] = ()


class Processors:
    """An engine's logits processors. Launch thread only."""

    def __init__(
        self, processors: Sequence[tuple[str, LogitsProcessor]], device: torch.device
    ) -> None:
        """processors: (name for errors, processor), in order."""
        self._active = [_Active(plugin, processor) for plugin, processor in processors]
        self._device = device
        self._greedy: set[int] = set()
        self._failed: dict[int, str] = {}
        """Slot → reason to end its request."""

    @classmethod
    def load(
        cls, plugins: Plugins, config: EngineConfig, setup: LogitsProcessorSetup
    ) -> Processors:
        """Create the active processors; a failure stops the start."""
        processors: list[tuple[str, LogitsProcessor]] = []
        registry = plugins[KIND]
        for name in active_processors(plugins, config):
            processor = registry.load(name)
            with registry.calling(name, "__init__"):
                processors.append((registry.described(name), processor(setup)))
        return cls(processors, setup.device)

    def __bool__(self) -> bool:
        return bool(self._active)

    def start(self, start: SlotStart) -> bool:
        """Start a request; return whether a processor serves it or failed on it."""
        self.release(start.slot)
        slot = start.slot
        if start.params.greedy:
            self._greedy.add(slot)
        for active in self._active:
            try:
                if active.processor.start(slot, start):
                    active.slots.add(slot)
            except Exception as error:
                self._fail(active, (slot,), error)
        return slot in self._failed or any(slot in active.slots for active in self._active)

    def release(self, slot: int) -> None:
        """Release a slot. Safe to call twice."""
        self._greedy.discard(slot)
        self._failed.pop(slot, None)
        for active in self._active:
            if slot in active.slots:
                active.slots.discard(slot)
                try:
                    active.processor.end(slot)
                except Exception:
                    logger.exception("%s failed at the end of a request", active.who)

    def bars_drafts(self, slot: int) -> bool:
        """Return whether a processor serves the slot that sees each token once, in order."""
        return any(
            slot in active.slots and not active.processor.stateless for active in self._active
        )

    def serves(self, rows_host: Sequence[int], *, invariant: bool) -> bool:
        """Return whether `apply` would change anything."""
        return any(self._rows(active, rows_host, invariant) for active in self._active)

    def _rows(self, active: _Active, rows_host: Sequence[int], invariant: bool) -> list[int]:
        if not active.slots or active.processor.argmax_invariant is not invariant:
            return []
        skipped = self._failed.keys() | (self._greedy if invariant else set())
        return [
            row
            for row, slot in enumerate(rows_host)
            if slot in active.slots and slot not in skipped
        ]

    def apply(
        self,
        logits: torch.Tensor,
        rows_host: Sequence[int],
        lengths: torch.Tensor,
        *,
        invariant: bool,
    ) -> None:
        """Apply one kind's processors in place. logits: [R, vocab_size] float32"""
        for active in self._active:
            rows = self._rows(active, rows_host, invariant)
            if not rows:
                continue
            served = tuple(rows_host[row] for row in rows)
            # Not the slots of the step: rows whose drafts have ended use the padding slot.
            numbers = torch.tensor([rows, served], dtype=torch.int64)
            if self._device.type == "cuda":
                numbers = numbers.pin_memory().to(self._device, non_blocking=True)
            index, slots = numbers
            processed_rows = ProcessedRows(served, slots, lengths[index].long())
            try:
                if served != active.last_rows:
                    active.last_rows = served
                    active.processor.batch_changed(served)
                part = logits.index_select(0, index)
                shape = tuple(part.shape)  # Before the processor, which may resize it in place.
                changed = active.processor.apply(part, processed_rows)
                if not isinstance(changed, torch.Tensor) or changed.shape != shape:
                    what = (
                        tuple(changed.shape) if isinstance(changed, torch.Tensor) else type(changed)
                    )
                    raise ValueError(f"apply gave {what}, not logits of {shape}")
                if changed.device != logits.device:  # torch 2.11 copies nothing from `meta`.
                    raise ValueError(f"apply gave logits on {changed.device}, not {logits.device}")
                logits.index_copy_(0, index, changed.to(torch.float32))
            except Exception as error:
                active.last_rows = ()
                self._fail(active, served, error)

    def _fail(self, active: _Active, slots: tuple[int, ...], error: Exception) -> None:
        logger.error("%s failed", active.who, exc_info=error)
        for slot in slots:
            self._failed[slot] = f"{active.who} failed: {type(error).__name__}: {error}"

    def failures(self, rows_host: Sequence[int]) -> dict[int, str]:
        """Return row → reason to end its request."""
        if not self._failed:
            return {}
        return {
            row: self._failed[slot] for row, slot in enumerate(rows_host) if slot in self._failed
        }

"""Log-probabilities of prompt tokens.

A step's rows are scored together, in chunks of positions that bound the logits' memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...protocols.models import HiddenStates
from ...step import NOTHING_IN_PROCESS, InProcess, SlotStart
from ..batch import LogitPlaces, LogitRows, StepRows
from ..hidden_states import parts, take
from ..launched_step import LOGPROB_FIELDS, PromptScores
from ..packing import PackedUpload
from ..per_slot import PerSlot
from ..slot_table import SlotTable
from .sampler import SCORED_ROWS, Sampler


class PromptLogprobs(PerSlot):
    def __init__(
        self,
        table: SlotTable,
        sampler: Sampler,
        compute_logits: Callable[[HiddenStates, LogitPlaces], torch.Tensor],
        vocab_size: int,
    ) -> None:
        """`compute_logits`: from hidden states of N tokens, and whose they are, to [N,
        vocab_size]."""
        self._table = table
        self._sampler = sampler
        self._compute_logits = compute_logits
        self._vocab_size = vocab_size
        self._top_tokens: dict[int, int] = {}
        """Slot → number of top tokens."""

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        self.release(start.slot)
        k = start.params.prompt_logprobs
        if k is not None:
            self._top_tokens[start.slot] = self._vocab_size if k < 0 else min(k, self._vocab_size)

    def release(self, slot: int) -> None:
        self._top_tokens.pop(slot, None)

    def score(self, rows: StepRows, hidden: HiddenStates) -> list[PromptScores]:
        """Score the prompt tokens after a step's positions, if requested.

        hidden: of T tokens or more.
        """
        if not self._top_tokens:
            return []
        # Of a row, the positions before the prompt's last token, whose successor is not of it.
        counts = np.minimum(rows.query_lens, self._table.num_prompt[rows.slots] - 1
                            - rows.first_positions)  # fmt: skip
        spans: dict[int, list[tuple[int, int]]] = {}
        for row, slot in enumerate(rows.slots.tolist()):
            k = self._top_tokens.get(slot)
            if k is not None and counts[row] > 0:
                spans.setdefault(k, []).append((row, int(counts[row])))
        return [self._score(rows, each, k, hidden) for k, each in spans.items()]

    def _score(
        self, rows: StepRows, spans: list[tuple[int, int]], k: int, hidden: HiddenStates
    ) -> PromptScores:
        logits = LogitRows.leading(rows, *zip(*spans, strict=True))
        first_tokens = rows.query_start[logits.rows]
        following = rows.first_positions[logits.rows] + (logits.tokens - first_tokens) + 1
        upload = PackedUpload(parts(hidden)[0].device)
        upload.add(logits.tokens.astype(np.int64))
        slots = rows.slots[logits.rows].astype(np.int64)
        upload.add(self._table.history_places(slots, following))
        upload.add(slots)
        upload.add(following.astype(np.int64))
        tokens, history, row_slots, lengths = upload.send()
        targets = self._table.storage.take(history).long()
        scored = []
        for at in range(0, len(targets), SCORED_ROWS):
            own = slice(at, at + SCORED_ROWS)
            places = LogitPlaces(
                row_slots[own], lengths[own], slots[own].tolist(), following[own] - 1
            )
            own_logits = self._compute_logits(take(hidden, tokens[own]), places)
            scored.append(self._sampler.prompt_logprobs(own_logits, targets[own], k))
        tables = {
            name: torch.cat([getattr(part, name) for part in scored]) for name in LOGPROB_FIELDS
        }
        return PromptScores(k, spans, {**tables, "targets": targets})

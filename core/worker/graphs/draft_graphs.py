"""Steps whose rows all have as many drafts, as recorded graphs of forward pass, sampling and
verification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ...nn.context import MixedRows
from ...protocols.models import HiddenStates
from ...step import StepPlan
from ..batch import LogitPlaces, PersistentBatch, StepInputs
from ..sampling.rejection import DrawnDrafts
from ..sampling.sampler import Sampler
from .endings import Ending, row_counts, sample_rows, sampling_endings
from .recorder import Recorder, Replay
from .static_numbers import StaticNumbers

BLOCKS_PER_ROW = 2
"""Most new blocks per row and block that its tokens fill."""
MAX_TOKENS = 512
"""Tokens of the largest recorded step; beyond, the device hides the launches."""


class DraftGraphs:
    """Records steps by rows, and replays them; smaller ones are padded."""

    def __init__(
        self,
        *,
        forward: Callable[[StepInputs], HiddenStates],
        logits: Callable[[HiddenStates, Ending, LogitPlaces], torch.Tensor],
        batch: PersistentBatch,
        sampler: Sampler,
        verified: Callable[..., torch.Tensor],
        drawn: Callable[..., DrawnDrafts] | None,
        record: Recorder,
        max_tokens: int,
        num_drafts: int,
    ) -> None:
        """`forward`, `logits`: as for `DecodeGraphs`, over all tokens; `max_tokens`: of any step;
        `num_drafts`: of each row; `drawn`: of drafts that are accepted by what they were drawn
        from (`DraftVerifier.drawn`).
        """
        self._forward, self._logits = forward, logits
        self._batch, self._sampler, self._verified = batch, sampler, verified
        self._drawn, self._record = drawn, record
        width = self.width = 1 + num_drafts
        most_tokens = min(max_tokens, MAX_TOKENS)
        self._counts = [n for n in row_counts(batch.num_slots) if n * width <= most_tokens]
        self._replays: dict[tuple[int, Ending], Replay] = {}
        max_rows = max(self._counts, default=0)
        device = batch.device
        per_row = BLOCKS_PER_ROW * (1 + width // batch.block_size)
        self._most_writes = max_rows * per_row * batch.num_groups
        self._header = -(-max_rows // 4) * 4 + 4  # The writes begin at a multiple of 16 bytes.
        size = self._header + 2 * self._most_writes
        self._numbers = StaticNumbers(batch, size)
        self._starts = width * torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._row_of = torch.arange(max_rows * width, device=device) // width
        order = torch.arange(max_rows * width, device=device) % width
        self._places = order.masked_fill_(order == num_drafts, batch.num_drafts)
        self._bounds: dict[int, torch.Tensor] = {}
        self.outputs = sampler.outputs
        """The last step's tokens, `width` per row."""
        self.verdicts = torch.zeros((max_rows, 2), dtype=torch.int32, device=device)
        """The last step's `verified`."""

    def missing(self) -> list[tuple[int, Ending]]:
        """Return what to record, smallest first: drafts pay for few rows."""
        endings = sampling_endings(self._sampler)
        if self._drawn is not None:
            endings = [Ending.PLAIN]  # Of others, shapes depend on what the requests ask for.
        kinds = [(n, ending) for ending in endings for n in self._counts]
        return [kind for kind in kinds if kind not in self._replays]

    def record_next(self) -> None:
        """Record one more of those that are missing."""
        if missing := self.missing():
            self.record(*missing[0])

    def launch(self, plan: StepPlan, num_drafts: Sequence[int], ending: Ending) -> bool:
        """Replay a step; False, unchanged, if a row has others, or without a graph."""
        num_rows = len(plan.slots)
        able = (n for n in self._counts if n >= num_rows and (n, ending) in self._replays)
        rows = next(able, None)
        alike = set(num_drafts) == {self.width - 1} and not plan.starts
        num_writes = sum(len(write.block_ids) for write in plan.table_writes)
        if rows is None or not alike or num_writes > self._most_writes:
            return False
        table = self._batch.table
        writes = table.writes(plan)
        self._batch.rows(plan)
        self._send(np.asarray(plan.slots, dtype=np.int32), rows, writes)
        self._replays[rows, ending]()
        return True

    @property
    def row_counts(self) -> list[int]:
        """Return the numbers of rows that are recorded."""
        return [n for n in self._counts if (n, Ending.PLAIN) in self._replays]

    def run_scratch(self, rows: int) -> None:
        """Replay a step of the scratch slot alone."""
        none = np.zeros(0, dtype=np.int32)
        self._send(none, rows, none.reshape(0, 2))
        self._replays[rows, Ending.PLAIN]()

    def record(self, rows: int, ending: Ending) -> None:
        none = np.zeros(0, dtype=np.int32)
        self._send(none, rows, none.reshape(0, 2))
        self._step(rows, ending)
        self._replays[rows, ending] = self._record(lambda: self._step(rows, ending))

    def _send(self, slots: np.ndarray, rows: int, writes: np.ndarray) -> None:
        numbers = np.full(self._header + writes.size, self._batch.scratch_slot, dtype=np.int32)
        numbers[: len(slots)] = slots
        numbers[self._header - 4] = len(writes)
        numbers[self._header :] = writes.reshape(-1)
        self._numbers.send(numbers)

    def _step(self, rows: int, ending: Ending) -> None:
        batch, width, header = self._batch, self.width, self._header
        array, starts = self._numbers.array, self._starts[: rows + 1]
        writes = array[header:].view(-1, 2)
        batch.operations.scatter(batch.table.storage, writes, array[header - 4 : header - 3])
        slots, num_tokens = array[:rows], rows * width
        tensors = batch.step_tensors(starts, slots, slots, num_tokens)
        long_slots, lengths = tensors.sample_slots, tensors.positions + 1
        sample_slots = long_slots.index_select(0, self._row_of[:num_tokens])
        if rows not in self._bounds:
            bounds = torch.tensor([0, rows], dtype=torch.int32)
            self._bounds[rows] = bounds.to(batch.device)
        layouts = batch.layouts(
            tensors,
            starts,
            np.zeros(rows + 1, dtype=np.int32),
            np.full(rows, batch.max_model_len, dtype=np.int32),
            max_query_len=width,
            slots=slots,
            mixed=MixedRows(self._bounds[rows], 0, rows, width),
        )
        hidden = self._forward(
            StepInputs(
                input_ids=tensors.input_ids,
                positions=tensors.positions,
                slots=slots,
                layouts=layouts,
                logit_tokens=self._row_of[:num_tokens],
                sample_slots=sample_slots,
                sample_lengths=lengths,
                logit_rows=[],
                source=batch.source_layout(slots, starts, batch.source_bounds(num_tokens)),
            )
        )
        drafts = batch.table.token_history[sample_slots, lengths]
        places, outputs = LogitPlaces(sample_slots, lengths), self.outputs.first(num_tokens)
        if self._drawn is None:
            logits = self._logits(hidden, ending, places)
            sample_rows(self._sampler, ending, logits, sample_slots, lengths)
        else:
            drawn = self._drawn(drafts, sample_slots, self._places[:num_tokens])
            logits = self._logits(hidden, Ending.LOGITS, places)  # Of the whole vocabulary.
            self._sampler.sample_plain(logits, sample_slots, lengths, outputs, drawn)
        chosen = outputs.chosen
        verdicts = self._verified(chosen, drafts, starts, long_slots)
        self.verdicts[:rows].copy_(verdicts)
        # Padding was verified, too.
        batch.table.lengths[batch.scratch_slot].fill_(0)

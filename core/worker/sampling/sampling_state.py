"""The sampler's state per slot: parameters, counts, biases, stop and bad words.

The host writes numpy twins (`start`, `release`), `upload` sends changes in one copy, `plan` selects
the stages of a step.
"""

from __future__ import annotations

import struct

import numpy as np
import torch

from ...step import SlotStart
from ..packing import PackedUpload
from .gumbel import seed_lanes
from .sampling_columns import MOST_TOP_TOKENS, NUM_COLUMNS, Column, Flag
from .slot_lists import SlotLists, within
from .step_stages import Rows, Stage, StepStages, make_stages

SMALL_TOP_K = 1024
"""Largest top_k filtered by `topk` instead of a sort."""

_NO_TOP_P = 2.0
_IN_PROMPT = -32768
"""The sign bit of a count."""
MOST_COUNTED = 32767
_SETTINGS = struct.Struct("=8f5i")
"""Columns before RECORD."""


class _RowTable:
    """Wide rows for few slots: [capacity, width]; doubles when full."""

    def __init__(
        self, width: int, dtypes: tuple[torch.dtype, ...], device: torch.device, max_rows: int
    ) -> None:
        self._max_rows = max_rows
        self._free = list(range(max_rows - 1, -1, -1))
        self._capacity = 0
        self.tensors = [torch.empty((0, width), dtype=dtype, device=device) for dtype in dtypes]

    def take(self) -> int:
        """Return the row released last, or the lowest unused."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def reserve(self, row: int) -> None:
        """Ensure that `row` exists, keeping values."""
        if row < self._capacity:
            return
        capacity = min(self._max_rows, max(4, 2 * self._capacity, row + 1))
        for place, old in enumerate(self.tensors):
            grown = old.new_empty((capacity, old.shape[1]))
            grown[: self._capacity].copy_(old)
            self.tensors[place] = grown
        self._capacity = capacity


class SamplingState:
    """Per-slot sampling state, host and device. Used by the worker thread alone.

    token_history: [max_num_seqs, max_model_len] int32 on `device`, contiguous, written by the model
    runner.

    The last slot is for padding rows of recorded steps.

    With `kernels`, settings are on the device at fixed addresses; `plan` is for torch. Memory:
    `counts`, 2 bytes per slot and token (78 MB for 257 slots of 151,936 tokens); with kernels
    `allowed`, a bit each (4.9 MB), and a record of some kilobytes for each slot with lists. In
    torch biases have rows of floats, made when they are needed.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        token_history: torch.Tensor,
        *,
        kernels: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.token_history = token_history
        self.kernels = kernels
        self._host = np.zeros((max_num_seqs, NUM_COLUMNS), dtype=np.int32)
        for slot in range(max_num_seqs):
            self._make_idle(slot)
        self.packed = torch.from_numpy(self._host.copy()).to(device)
        """[max_num_seqs, NUM_COLUMNS] int32, floats bit-cast (`Column`)"""
        self.counts = torch.zeros((max_num_seqs, vocab_size), dtype=torch.int16, device=device)
        """[max_num_seqs, vocab_size] int16: times generated, up to MOST_COUNTED; sign bit: in the
        prompt. Only for slots with penalties."""
        words = -(-vocab_size // 32) if kernels else 0
        self.allowed = torch.zeros((max_num_seqs, words), dtype=torch.int32, device=device)
        """[max_num_seqs, ceil(vocab_size / 32)] int32: bit i % 32 of word i // 32 allows token i.
        Only with kernels, for `Flag.ALLOWED`."""
        self._records: dict[int, torch.Tensor] = {}
        """Kept alive for kernels: `packed` has their addresses."""
        self._flags = np.zeros(max_num_seqs, dtype=np.int32)
        self._stages = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_logprobs: dict[int, int] = {}
        """Slot → top tokens, with log-probabilities."""
        self._bias_row = np.full(max_num_seqs, -1, dtype=np.int64)
        self._lists: dict[int, SlotLists] = {}
        self._dirty: dict[int, SlotStart | None] = {}
        self._bias = _RowTable(vocab_size, (torch.float32,), device, max_num_seqs)
        self._version = 0
        self._planned: tuple[int, list[int], StepStages] | None = None
        self._last_flags: tuple[int, list[int], Flag] | None = None

    @property
    def num_slots(self) -> int:
        """Including the padding slot."""
        return len(self._host)

    @property
    def bias(self) -> torch.Tensor:
        """[rows, vocab_size] float32, -inf if not allowed. Only without kernels."""
        return self._bias.tensors[0]

    # ------------------------------------------------------------ slots

    def start(self, slot_start: SlotStart, *, processed: bool = False) -> None:
        """Start a request, ignoring token ids outside the vocabulary.

        processed: a processor serves it.
        """
        slot, params = slot_start.slot, slot_start.params
        self.release(slot)
        random = not params.greedy
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        top_p = params.top_p if params.top_p < 1.0 else _NO_TOP_P
        stages, flags = Stage(0), Flag(0)
        if random:
            stages |= Stage.RANDOM
            if top_k <= SMALL_TOP_K and top_k < self.vocab_size:
                stages |= Stage.TOP_K
            elif top_k < self.vocab_size or params.top_p < 1.0:
                stages |= Stage.SORT
            elif params.min_p > 0.0:
                stages |= Stage.MIN_P
            if top_k < self.vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
                flags |= Flag.FILTER
        if params.has_penalties:
            stages |= Stage.PENALTIES
            flags |= Flag.PENALTIES
        if slot_start.grammar is not None:
            flags |= Flag.GRAMMAR
        if processed:
            flags |= Flag.PROCESSED
        num_logprobs = 0
        if params.logprobs is not None:
            stages |= Stage.LOGPROBS
            whole = params.logprobs < 0 or params.logprobs > self.vocab_size
            num_logprobs = self.vocab_size if whole else params.logprobs
            flags |= Flag.LOGPROBS if num_logprobs <= MOST_TOP_TOKENS else Flag.WIDE
        if _lists_anything(slot_start):
            lists = SlotLists(slot_start, self.vocab_size)
            self._lists[slot] = lists
            if lists.words:
                stages |= Stage.BAD_WORDS
            if lists.stops.size:
                stages |= Stage.MIN_TOKENS
            if lists.bias or lists.allowed is not None:
                stages |= Stage.BIAS
                if not self.kernels:
                    self._bias_row[slot] = self._bias.take()
            if lists.bias:
                flags |= Flag.BIAS
            if lists.bars:
                flags |= Flag.BANS | Flag.ALLOWED
            if lists.allowed is not None:
                flags |= Flag.ALLOWED
        row = self._host[slot]
        _SETTINGS.pack_into(
            row.data, 0,
            1.0 / params.temperature if random else 1.0, float(random),
            _log(params.min_p), top_p, params.presence_penalty, params.frequency_penalty,
            params.repetition_penalty, _reciprocal(params.repetition_penalty), top_k,
            params.min_tokens, slot_start.num_prompt_tokens, int(flags), num_logprobs,
        )  # fmt: skip
        row[Column.LANES :] = seed_lanes(slot_start.seed)
        self._flags[slot] = int(flags)
        self._stages[slot] = int(stages)
        if params.logprobs is not None:
            self.num_logprobs[slot] = num_logprobs
        self._dirty[slot] = slot_start

    def release(self, slot: int) -> None:
        """Release a slot. Safe to call twice.

        Steps in flight read the old contents; changes are enqueued after them.
        """
        self._version += 1
        self._dirty.pop(slot, None)
        if slot == self.num_slots - 1:
            self._make_idle(slot)
            self._dirty[slot] = None
        self._flags[slot] = 0
        self._stages[slot] = 0
        self.num_logprobs.pop(slot, None)
        self._lists.pop(slot, None)
        self._records.pop(slot, None)
        if self._bias_row[slot] >= 0:
            self._bias.give_back(int(self._bias_row[slot]))
            self._bias_row[slot] = -1

    def _make_idle(self, slot: int) -> None:
        row = self._host[slot]
        row[:] = 0
        row[Column.FLAGS] = int(Flag.IDLE)
        row.view(np.float32)[Column.INVERSE_TEMPERATURE] = 1.0

    def asked(self, rows_host: list[int]) -> Flag:
        """Return these slots' flags combined."""
        if self._last_flags is not None:
            version, rows, flags = self._last_flags
            if version == self._version and rows == rows_host:
                return flags
        flags = Flag(int(np.bitwise_or.reduce(self._flags[rows_host]))) if rows_host else Flag(0)
        self._last_flags = (self._version, list(rows_host), flags)
        return flags

    def depends_on_output(self, slot: int) -> bool:
        """Whether tables that sampling changes decide about the next token (penalties, bad words,
        min_tokens): positions are sampled one after another.
        """
        return bool(self._flags[slot] & (Flag.PENALTIES | Flag.BANS))

    def has_grammar(self, slot: int) -> bool:
        return bool(self._flags[slot] & Flag.GRAMMAR)

    def scored_rows(self, rows_host: list[int]) -> tuple[Rows, int]:
        """Return rows with log-probabilities, and their largest number of top tokens."""
        slots = np.asarray(rows_host, dtype=np.int64)
        rows = np.flatnonzero(self._stages[slots] & int(Stage.LOGPROBS))
        batch = None
        if rows.size < slots.size:
            pack = PackedUpload(self.device)
            pack.add(rows.astype(np.int64))
            batch = pack.send()[0]
        return Rows(int(rows.size), batch), max(
            self.num_logprobs.get(slot, 0) for slot in slots.tolist()
        )

    def upload(self) -> None:
        """Enqueue changes: one copy, two with lists."""
        if not self._dirty:
            return
        starts = [start for start in self._dirty.values() if start is not None]
        biased = [s for s in starts if self._bias_row[s.slot] >= 0]
        penalized = [s for s in starts if self._flags[s.slot] & Flag.PENALTIES]
        barred = [s.slot for s in starts if self.kernels and self._flags[s.slot] & Flag.ALLOWED]
        if self.kernels:
            self._send_records([s.slot for s in starts])
        slots = np.fromiter(self._dirty, dtype=np.int64)
        arrays: list[np.ndarray] = [slots, self._host[slots]]
        if biased:
            arrays.extend(self._bias_entries(biased))
        if penalized:
            arrays.extend(self._count_entries(penalized))
        if barred:
            arrays.append(np.array(barred, dtype=np.int64))
            arrays.append(np.stack([self._lists[slot].bits() for slot in barred]))
        pack = PackedUpload(self.device)
        for array in arrays:
            pack.add(array)
        tensors = iter(pack.send())
        self.packed.index_copy_(0, next(tensors), next(tensors))
        if biased:
            for start in biased:
                row = int(self._bias_row[start.slot])
                self._bias.reserve(row)
                allowed = self._lists[start.slot].allowed
                self.bias[row].fill_(0.0 if allowed is None else float("-inf"))
            self.bias.view(-1).index_copy_(0, next(tensors), next(tensors))
        if penalized:
            flat = self.counts.view(-1)
            self.counts.index_fill_(0, next(tensors), 0)
            flat.index_fill_(0, next(tensors), _IN_PROMPT)
            flat.index_copy_(0, next(tensors), next(tensors).to(torch.int16))
        if barred:
            self.allowed.index_copy_(0, next(tensors), next(tensors))
        self._dirty.clear()

    def _send_records(self, slots: list[int]) -> None:
        listed = int(Flag.BANS | Flag.BIAS)
        slots = [slot for slot in slots if self._flags[slot] & listed]
        pack = PackedUpload(self.device)
        for slot in slots:
            pack.add(self._lists[slot].record())
        for slot, record in zip(slots, pack.send(), strict=True):
            self._records[slot] = record
            address = np.array([record.data_ptr()], dtype=np.int64).view(np.int32)
            self._host[slot, Column.RECORD : Column.RECORD + 2] = address

    def _bias_entries(self, starts: list[SlotStart]) -> tuple[np.ndarray, np.ndarray]:
        """Return unique flat positions in the bias table, and values."""
        places: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for start in starts:
            lists = self._lists[start.slot]
            ids = np.array(sorted(lists.bias), dtype=np.int64)
            if lists.allowed is not None:
                ids = lists.allowed
            places.append(ids + self._bias_row[start.slot] * self.vocab_size)
            values.append(np.array([lists.bias.get(int(t), 0.0) for t in ids], dtype=np.float32))
        return np.concatenate(places), np.concatenate(values)

    def _count_entries(self, starts: list[SlotStart]) -> tuple[np.ndarray, ...]:
        """Return slots; flat positions of prompt tokens; unique ones of generated tokens; their
        counts.
        """
        prompt: list[np.ndarray] = []
        output: list[np.ndarray] = []
        counts: list[np.ndarray] = []
        for start in starts:
            base = start.slot * self.vocab_size
            tokens = np.asarray(start.token_ids, dtype=np.int64)
            before = within(tokens[: start.num_prompt_tokens], self.vocab_size)
            after = within(tokens[start.num_prompt_tokens :], self.vocab_size)
            prompt.append(before + base)
            if after.size:
                ids, count = np.unique(after, return_counts=True)
                num_counted = np.minimum(count, MOST_COUNTED)
                output.append(ids + base)
                counts.append(np.where(np.isin(ids, before), num_counted | _IN_PROMPT, num_counted))
        slots = np.array([start.slot for start in starts], dtype=np.int64)
        nothing = np.zeros(0, dtype=np.int64)
        return (
            slots,
            np.concatenate(prompt),
            np.concatenate([nothing, *output]),
            np.concatenate([nothing, *counts]).astype(np.int32),
        )

    # ------------------------------------------------------------ steps

    def plan(self, rows_host: list[int]) -> StepStages:
        """Return these slots' stages, sending indices in one copy.

        Reused for the same rows without slot changes.
        """
        if self._planned is not None:
            version, rows, stages = self._planned
            if version == self._version and rows == rows_host:
                return stages
        stages = make_stages(
            np.asarray(rows_host, dtype=np.int64),
            self.device,
            stages=self._stages,
            bias_rows=self._bias_row,
            top_ks=self._host[:, Column.TOP_K],
            lists=self._lists,
            num_logprobs=self.num_logprobs,
        )
        self._planned = (self._version, list(rows_host), stages)
        return stages


def _lists_anything(start: SlotStart) -> bool:
    params = start.params
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or start.bad_words_token_ids
        or (params.min_tokens > 0 and start.stop_token_ids)
    )


def _log(value: float) -> float:
    small = np.float32(value)
    return float(np.log(small)) if small > 0.0 else float("-inf")


def _reciprocal(value: float) -> float:
    return float(np.float32(1.0) / np.float32(value))

"""What the sampler knows about each slot: parameters, penalty counts, biases, stop and bad words.

The host writes numpy twins (`start`, `release`), `upload` sends what changed in one copy, and
`plan` says which stages the rows of a step need, so that nothing unneeded runs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import torch

from ..types import SlotStart
from .noise import NUM_LANES, seed_lanes
from .packing import PackedUpload

SMALL_TOP_K = 1024
"""Rows with a top_k up to this are filtered by `topk`, others by a full sort."""

_NO_TOP_P = 2.0


class Column(enum.IntEnum):
    """Columns of the packed per-slot parameters, 32 bits each."""

    INVERSE_TEMPERATURE = 0
    """float; 1 for greedy rows"""
    NOISE = 1
    """float; weight of the Gumbel noise: 0 for greedy rows, else 1"""
    LOG_MIN_P = 2
    """float; -inf: off"""
    TOP_P = 3
    """float; 2: off"""
    PRESENCE = 4
    FREQUENCY = 5
    REPETITION = 6
    TOP_K = 7
    """int; vocab_size: off"""
    MIN_TOKENS = 8
    PROMPT_LEN = 9
    LANES = 10
    """int; NUM_LANES of them, the seed"""


NUM_COLUMNS = Column.LANES + NUM_LANES


class Stage(enum.IntFlag):
    """Work that a slot asks for."""

    RANDOM = enum.auto()
    """Not greedy."""
    TOP_K = enum.auto()
    """A top_k of at most SMALL_TOP_K: candidates by `topk`."""
    SORT = enum.auto()
    """A top_p, or a larger top_k, without a small top_k: candidates by a full sort."""
    MIN_P = enum.auto()
    """A min_p without either of those."""
    BIAS = enum.auto()
    """logit_bias or allowed_token_ids."""
    BAD_WORDS = enum.auto()
    MIN_TOKENS = enum.auto()
    PENALTIES = enum.auto()
    LOGPROBS = enum.auto()


@dataclass(frozen=True)
class Rows:
    """Some rows of a step. Indices are device tensors; `batch` None means every row, in order."""

    count: int
    batch: torch.Tensor | None
    """[count] int64"""


@dataclass(frozen=True)
class TableRows(Rows):
    """Rows with an entry each in a side table."""

    table: torch.Tensor
    """[count] int64"""


@dataclass(frozen=True)
class StopRows(Rows):
    """Rows that may have to mask their stop ids."""

    stop_ids: torch.Tensor
    """[count, S] int64, padded with -1"""


@dataclass(frozen=True)
class BadWordRows(Rows):
    """Rows with bad words."""

    words: torch.Tensor
    """[count, W, L] int64, aligned right, padded with -1"""


@dataclass(frozen=True)
class StepStages:
    """Which stages the rows of one step need, and for which of them."""

    num_rows: int
    all_greedy: bool
    plain: Rows | None
    """Rows without top-k and top-p, greedy ones included; None when there are none."""
    any_min_p: bool
    """Some plain row has a min_p."""
    top_k: Rows | None
    max_top_k: int
    sort: Rows | None
    bias: TableRows | None
    bad_words: BadWordRows | None
    min_tokens: StopRows | None
    penalties: TableRows | None
    logprobs: Rows | None
    max_logprobs: int
    """Most top tokens that a row asks for (the vocabulary's size for -1); 0 without logprobs."""

    @property
    def processes_logits(self) -> bool:
        """Some stage changes logits before the choice."""
        return any(
            rows is not None
            for rows in (self.bias, self.bad_words, self.min_tokens, self.penalties)
        )

    @property
    def graph_safe(self) -> bool:
        """No stage holds indices of this very step: fixed shapes and addresses."""
        return not (self.processes_logits or self.top_k or self.sort or self.logprobs)


def plain_stages(num_rows: int) -> StepStages:
    """Rows with at most a temperature."""
    return StepStages(
        num_rows=num_rows,
        all_greedy=False,
        plain=Rows(num_rows, None),
        any_min_p=False,
        top_k=None,
        max_top_k=0,
        sort=None,
        bias=None,
        bad_words=None,
        min_tokens=None,
        penalties=None,
        logprobs=None,
        max_logprobs=0,
    )


class _RowTable:
    """Wide rows for the few slots that need them: [capacity, width], grown by doubling."""

    def __init__(
        self, width: int, dtypes: tuple[torch.dtype, ...], device: torch.device, max_rows: int
    ) -> None:
        self._max_rows = max_rows
        self._free = list(range(max_rows - 1, -1, -1))
        self._capacity = 0
        self.tensors = [torch.empty((0, width), dtype=dtype, device=device) for dtype in dtypes]

    def take(self) -> int:
        """The lowest row returned last, or never used."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def reserve(self, row: int) -> None:
        """Make sure that `row` exists. Old rows keep their values."""
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

    token_history: [max_num_seqs, max_model_len] int32 on `device`, contiguous, written by the
    model runner: row s holds the tokens of slot s, each before the token after it is sampled.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        token_history: torch.Tensor,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.token_history = token_history
        self.packed = torch.zeros((max_num_seqs, NUM_COLUMNS), dtype=torch.int32, device=device)
        """[max_num_seqs, NUM_COLUMNS] int32, float columns bit-cast"""
        self._host = np.zeros((max_num_seqs, NUM_COLUMNS), dtype=np.int32)
        self._host_floats = self._host.view(np.float32)
        self._stages = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self._bias_row = np.full(max_num_seqs, -1, dtype=np.int64)
        self._penalty_row = np.full(max_num_seqs, -1, dtype=np.int64)
        self._stop_ids: dict[int, np.ndarray] = {}
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}
        self._dirty: dict[int, SlotStart] = {}
        self._bias = _RowTable(vocab_size, (torch.float32,), device, max_num_seqs)
        self._counts = _RowTable(vocab_size, (torch.int32, torch.bool), device, max_num_seqs)
        self._version = 0
        self._planned: tuple[int, list[int], StepStages] | None = None

    @property
    def bias(self) -> torch.Tensor:
        """[rows, vocab_size] float32, added to logits; -inf where a token is not allowed."""
        return self._bias.tensors[0]

    @property
    def output_counts(self) -> torch.Tensor:
        """[rows, vocab_size] int32: how often each token was generated."""
        return self._counts.tensors[0]

    @property
    def in_prompt(self) -> torch.Tensor:
        """[rows, vocab_size] bool: tokens of the prompt."""
        return self._counts.tensors[1]

    # ------------------------------------------------------------ slots

    def start(self, slot_start: SlotStart) -> None:
        """A request takes a slot. Token ids outside the vocabulary cannot be sampled: ignored."""
        slot, params = slot_start.slot, slot_start.params
        self.release(slot)
        stages = Stage(0)
        floats, ints = self._host_floats[slot], self._host[slot]
        random = not params.greedy
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        floats[Column.INVERSE_TEMPERATURE] = 1.0 / params.temperature if random else 1.0
        floats[Column.NOISE] = float(random)
        with np.errstate(divide="ignore"):
            floats[Column.LOG_MIN_P] = np.log(np.float32(params.min_p))
        floats[Column.TOP_P] = params.top_p if params.top_p < 1.0 else _NO_TOP_P
        floats[Column.PRESENCE] = params.presence_penalty
        floats[Column.FREQUENCY] = params.frequency_penalty
        floats[Column.REPETITION] = params.repetition_penalty
        ints[Column.TOP_K] = top_k
        ints[Column.MIN_TOKENS] = params.min_tokens
        ints[Column.PROMPT_LEN] = slot_start.num_prompt_tokens
        ints[Column.LANES :] = seed_lanes(slot_start.seed)

        if random:
            stages |= Stage.RANDOM
            if top_k <= SMALL_TOP_K and top_k < self.vocab_size:
                stages |= Stage.TOP_K
            elif top_k < self.vocab_size or params.top_p < 1.0:
                stages |= Stage.SORT
            elif params.min_p > 0.0:
                stages |= Stage.MIN_P
        if params.logit_bias or params.allowed_token_ids is not None:
            stages |= Stage.BIAS
            self._bias_row[slot] = self._bias.take()
        if params.has_penalties:
            stages |= Stage.PENALTIES
            self._penalty_row[slot] = self._counts.take()
        stop_ids = self._in_vocabulary(slot_start.stop_token_ids)
        # A grammar holds ends back by itself: only it knows when nothing else is possible.
        if params.min_tokens > 0 and stop_ids.size and slot_start.grammar is None:
            stages |= Stage.MIN_TOKENS
            self._stop_ids[slot] = stop_ids
        words = [w for w in slot_start.bad_words_token_ids if w and 0 <= w[-1] < self.vocab_size]
        if words:
            stages |= Stage.BAD_WORDS
            self._bad_words[slot] = words
        if params.logprobs is not None:
            stages |= Stage.LOGPROBS
            whole = params.logprobs < 0 or params.logprobs > self.vocab_size
            self._num_logprobs[slot] = self.vocab_size if whole else params.logprobs
        self._stages[slot] = int(stages)
        self._dirty[slot] = slot_start

    def release(self, slot: int) -> None:
        """The slot's request ended or was preempted. Safe to call twice.

        Steps in flight still read the slot's table rows; what reuses them is enqueued later.
        """
        self._version += 1
        self._dirty.pop(slot, None)
        self._stages[slot] = 0
        self._num_logprobs[slot] = 0
        self._stop_ids.pop(slot, None)
        self._bad_words.pop(slot, None)
        for rows, table in ((self._bias_row, self._bias), (self._penalty_row, self._counts)):
            if rows[slot] >= 0:
                table.give_back(int(rows[slot]))
                rows[slot] = -1

    def upload(self) -> None:
        """Enqueue what changed since the last call, in one copy; nothing if nothing did."""
        if not self._dirty:
            return
        slots = np.fromiter(self._dirty, dtype=np.int64)
        biased = [s for s in self._dirty.values() if self._bias_row[s.slot] >= 0]
        penalized = [s for s in self._dirty.values() if self._penalty_row[s.slot] >= 0]
        pack = PackedUpload(self.device)
        pack.add(slots)
        pack.add(self._host[slots])
        if biased:
            for array in self._bias_entries(biased):
                pack.add(array)
        if penalized:
            for array in self._count_entries(penalized):
                pack.add(array)
        sent = pack.send()
        self.packed.index_copy_(0, sent[0], sent[1])
        rest = sent[2:]
        if biased:
            for start in biased:
                row = int(self._bias_row[start.slot])
                self._bias.reserve(row)
                barred = start.params.allowed_token_ids is not None
                self.bias[row].fill_(float("-inf") if barred else 0.0)
            self.bias.view(-1).index_copy_(0, rest[0], rest[1])
            rest = rest[2:]
        if penalized:
            for start in penalized:
                row = int(self._penalty_row[start.slot])
                self._counts.reserve(row)
                self.output_counts[row].zero_()
                self.in_prompt[row].zero_()
            self.in_prompt.view(-1).index_fill_(0, rest[0], True)
            self.output_counts.view(-1).index_copy_(0, rest[1], rest[2])
        self._dirty.clear()

    def _in_vocabulary(self, token_ids: tuple[int, ...]) -> np.ndarray:
        ids = np.asarray(token_ids, dtype=np.int64)
        return ids[(ids >= 0) & (ids < self.vocab_size)]

    def _bias_entries(self, starts: list[SlotStart]) -> tuple[np.ndarray, np.ndarray]:
        """Flat positions in the bias table, each once, and the values there."""
        places: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for start in starts:
            bias = start.params.logit_bias or {}
            allowed = start.params.allowed_token_ids
            ids = np.unique(self._in_vocabulary(tuple(bias) if allowed is None else allowed))
            places.append(ids + self._bias_row[start.slot] * self.vocab_size)
            values.append(np.array([bias.get(int(t), 0.0) for t in ids], dtype=np.float32))
        return np.concatenate(places), np.concatenate(values)

    def _count_entries(self, starts: list[SlotStart]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Flat positions of prompt tokens; of generated tokens, each once; counts of the latter."""
        prompt: list[np.ndarray] = []
        output: list[np.ndarray] = []
        counts: list[np.ndarray] = []
        for start in starts:
            base = self._penalty_row[start.slot] * self.vocab_size
            known = start.num_prompt_tokens
            prompt.append(np.unique(self._in_vocabulary(start.token_ids[:known])) + base)
            ids, count = np.unique(self._in_vocabulary(start.token_ids[known:]), return_counts=True)
            output.append(ids + base)
            counts.append(count.astype(np.int32))
        return np.concatenate(prompt), np.concatenate(output), np.concatenate(counts)

    # ------------------------------------------------------------ steps

    def plan(self, rows_host: list[int]) -> StepStages:
        """Which stages a step over these slots needs; indices travel in one copy, if any at all.

        The same rows without a start or release between are planned once.
        """
        if self._planned is not None:
            version, rows, stages = self._planned
            if version == self._version and rows == rows_host:
                return stages
        stages = self._make_plan(np.asarray(rows_host, dtype=np.int64))
        self._planned = (self._version, list(rows_host), stages)
        return stages

    def _make_plan(self, slots: np.ndarray) -> StepStages:
        bits = self._stages[slots]
        union = Stage(int(np.bitwise_or.reduce(bits))) if bits.size else Stage(0)
        filtered = int(Stage.TOP_K | Stage.SORT)
        pack = PackedUpload(self.device)

        def select(mask: np.ndarray) -> tuple[np.ndarray, int | None] | None:
            found = np.flatnonzero(mask)
            if not found.size:
                return None
            return found, None if found.size == slots.size else pack.add(found.astype(np.int64))

        def having(stage: Stage) -> tuple[np.ndarray, int | None] | None:
            return select(bits & int(stage) != 0) if union & stage else None

        plain = select(bits & filtered == 0) if union & filtered else (np.arange(slots.size), None)
        top_k, sort = having(Stage.TOP_K), having(Stage.SORT)
        bias, penalties = having(Stage.BIAS), having(Stage.PENALTIES)
        bad_words, min_tokens = having(Stage.BAD_WORDS), having(Stage.MIN_TOKENS)
        logprobs = having(Stage.LOGPROBS)
        bias_place = pack.add(self._bias_row[slots[bias[0]]]) if bias else -1
        penalty_place = pack.add(self._penalty_row[slots[penalties[0]]]) if penalties else -1
        words_place = pack.add(self._padded_words(slots[bad_words[0]])) if bad_words else -1
        stop_place = pack.add(self._padded_stops(slots[min_tokens[0]])) if min_tokens else -1
        sent = pack.send()

        def batch(rows: tuple[np.ndarray, int | None]) -> torch.Tensor | None:
            return None if rows[1] is None else sent[rows[1]]

        def plain_rows(rows: tuple[np.ndarray, int | None] | None) -> Rows | None:
            return Rows(rows[0].size, batch(rows)) if rows else None

        return StepStages(
            num_rows=int(slots.size),
            all_greedy=not union & Stage.RANDOM,
            plain=plain_rows(plain),
            any_min_p=bool(union & Stage.MIN_P),
            top_k=plain_rows(top_k),
            max_top_k=int(self._host[slots[top_k[0]], Column.TOP_K].max()) if top_k else 0,
            sort=plain_rows(sort),
            bias=TableRows(bias[0].size, batch(bias), sent[bias_place]) if bias else None,
            bad_words=(
                BadWordRows(bad_words[0].size, batch(bad_words), sent[words_place])
                if bad_words
                else None
            ),
            min_tokens=(
                StopRows(min_tokens[0].size, batch(min_tokens), sent[stop_place])
                if min_tokens
                else None
            ),
            penalties=(
                TableRows(penalties[0].size, batch(penalties), sent[penalty_place])
                if penalties
                else None
            ),
            logprobs=plain_rows(logprobs),
            max_logprobs=int(self._num_logprobs[slots].max()) if logprobs else 0,
        )

    def _padded_stops(self, slots: np.ndarray) -> np.ndarray:
        lists = [self._stop_ids[slot] for slot in slots.tolist()]
        padded = np.full((len(lists), max(map(len, lists))), -1, dtype=np.int64)
        for row, ids in zip(padded, lists, strict=True):
            row[: len(ids)] = ids
        return padded

    def _padded_words(self, slots: np.ndarray) -> np.ndarray:
        lists = [self._bad_words[slot] for slot in slots.tolist()]
        most = max(map(len, lists))
        longest = max(len(word) for words in lists for word in words)
        padded = np.full((len(lists), most, longest), -1, dtype=np.int64)
        for row, words in zip(padded, lists, strict=True):
            for target, word in zip(row, words, strict=False):
                target[longest - len(word) :] = word
        return padded

"""Stages that a step needs for sampling in torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..packing import PackedUpload
from .slot_lists import SlotLists


class Stage(enum.IntFlag):
    """A slot's required work."""

    RANDOM = enum.auto()
    """Not greedy."""
    TOP_K = enum.auto()
    """A top_k up to SMALL_TOP_K: by `topk`."""
    SORT = enum.auto()
    """A top_p, or larger top_k: by a full sort."""
    MIN_P = enum.auto()
    """A min_p without top_k or top_p."""
    BIAS = enum.auto()
    """logit_bias or allowed_token_ids."""
    BAD_WORDS = enum.auto()
    MIN_TOKENS = enum.auto()
    PENALTIES = enum.auto()
    LOGPROBS = enum.auto()


@dataclass(frozen=True)
class Rows:
    """Some rows of a step; device indices, or `batch` None for all."""

    count: int
    batch: torch.Tensor | None
    """[count] int64"""


@dataclass(frozen=True)
class TableRows(Rows):
    table: torch.Tensor
    """[count] int64"""


@dataclass(frozen=True)
class StopRows(Rows):
    stop_ids: torch.Tensor
    """[count, S] int64, padded with -1"""


@dataclass(frozen=True)
class BadWordRows(Rows):
    words: torch.Tensor
    """[count, W, L] int64, aligned right, padded with -1"""


@dataclass(frozen=True)
class StepStages:
    """A step's stages, and their rows."""

    num_rows: int
    all_greedy: bool
    plain: Rows | None
    """Rows without top-k and top-p, or None."""
    any_min_p: bool
    """Whether a plain row has a min_p."""
    top_k: Rows | None
    max_top_k: int
    sort: Rows | None
    bias: TableRows | None
    bad_words: BadWordRows | None
    min_tokens: StopRows | None
    penalties: Rows | None
    logprobs: Rows | None
    max_logprobs: int
    """Largest number of top tokens (vocabulary size for -1); 0: none."""

    @property
    def processes_logits(self) -> bool:
        """Whether logits change before the choice."""
        return any(
            rows is not None
            for rows in (self.bias, self.bad_words, self.min_tokens, self.penalties)
        )

    @property
    def graph_safe(self) -> bool:
        """Whether shapes and addresses are fixed."""
        return not (self.processes_logits or self.top_k or self.sort or self.logprobs)


def plain_stages(num_rows: int) -> StepStages:
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


def make_stages(
    slots: np.ndarray,
    device: torch.device,
    *,
    stages: np.ndarray,
    bias_rows: np.ndarray,
    top_ks: np.ndarray,
    lists: Mapping[int, SlotLists],
    num_logprobs: Mapping[int, int],
) -> StepStages:
    """Return these slots' stages, sending indices in one copy.

    slots: [num_rows]. By slot: stages, [slots] int32 (`Stage`); bias_rows, [slots] int64; top_ks,
    [slots]; lists, if any; num_logprobs, if requested.
    """
    bits = stages[slots]
    union = Stage(int(np.bitwise_or.reduce(bits))) if bits.size else Stage(0)
    filtered = int(Stage.TOP_K | Stage.SORT)
    pack = PackedUpload(device)

    def select(mask: np.ndarray) -> tuple[np.ndarray, int | None] | None:
        indices = np.flatnonzero(mask)
        if not indices.size:
            return None
        return indices, None if indices.size == slots.size else pack.add(indices.astype(np.int64))

    def having(stage: Stage) -> tuple[np.ndarray, int | None] | None:
        return select(bits & int(stage) != 0) if union & stage else None

    plain = select(bits & filtered == 0) if union & filtered else (np.arange(slots.size), None)
    top_k, sort = having(Stage.TOP_K), having(Stage.SORT)
    bias, penalties = having(Stage.BIAS), having(Stage.PENALTIES)
    bad_words, min_tokens = having(Stage.BAD_WORDS), having(Stage.MIN_TOKENS)
    logprobs = having(Stage.LOGPROBS)
    bias_place = pack.add(bias_rows[slots[bias[0]]]) if bias else -1
    words_place = pack.add(_padded_words(lists, slots[bad_words[0]])) if bad_words else -1
    stop_place = pack.add(_padded_stops(lists, slots[min_tokens[0]])) if min_tokens else -1
    tensors = pack.send()

    def batch(rows: tuple[np.ndarray, int | None]) -> torch.Tensor | None:
        return None if rows[1] is None else tensors[rows[1]]

    def plain_rows(rows: tuple[np.ndarray, int | None] | None) -> Rows | None:
        return Rows(rows[0].size, batch(rows)) if rows else None

    return StepStages(
        num_rows=int(slots.size),
        all_greedy=not union & Stage.RANDOM,
        plain=plain_rows(plain),
        any_min_p=bool(union & Stage.MIN_P),
        top_k=plain_rows(top_k),
        max_top_k=int(top_ks[slots[top_k[0]]].max()) if top_k else 0,
        sort=plain_rows(sort),
        bias=TableRows(bias[0].size, batch(bias), tensors[bias_place]) if bias else None,
        bad_words=(
            BadWordRows(bad_words[0].size, batch(bad_words), tensors[words_place])
            if bad_words
            else None
        ),
        min_tokens=(
            StopRows(min_tokens[0].size, batch(min_tokens), tensors[stop_place])
            if min_tokens
            else None
        ),
        penalties=plain_rows(penalties),
        logprobs=plain_rows(logprobs),
        max_logprobs=max(num_logprobs.get(slot, 0) for slot in slots.tolist()) if logprobs else 0,
    )


def _padded_stops(lists: Mapping[int, SlotLists], slots: np.ndarray) -> np.ndarray:
    stops = [lists[slot].stops for slot in slots.tolist()]
    padded = np.full((len(stops), max(map(len, stops))), -1, dtype=np.int64)
    for row, ids in zip(padded, stops, strict=True):
        row[: len(ids)] = ids
    return padded


def _padded_words(lists: Mapping[int, SlotLists], slots: np.ndarray) -> np.ndarray:
    bad_words = [lists[slot].words for slot in slots.tolist()]
    most = max(map(len, bad_words))
    longest = max(len(word) for words in bad_words for word in words)
    padded = np.full((len(bad_words), most, longest), -1, dtype=np.int64)
    for row, words in zip(padded, bad_words, strict=True):
        for target, word in zip(row, words, strict=False):
            target[longest - len(word) :] = word
    return padded

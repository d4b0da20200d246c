"""A slot's lists for kernels: stop ids, bad words, biases, allowed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...step import SlotStart

BIAS_PART = 1024
"""Tokens per entry of a record's index of biases."""


class SlotLists:
    """A request's token lists, limited to the vocabulary."""

    def __init__(self, start: SlotStart, vocab_size: int) -> None:
        self._start = start
        self._vocab_size = vocab_size
        params = start.params
        # A grammar's masks respect these lists; they alone know when nothing but an end is left.
        ends = () if start.grammar is None else tuple(start.grammar.eos_token_ids)
        self.allowed: np.ndarray | None = None
        """[any] int64, ascending; None: all"""
        if params.allowed_token_ids is not None:
            allowed = (*params.allowed_token_ids, *ends)
            self.allowed = np.unique(within(allowed, vocab_size))
        self.bias = {
            token: value
            for token, value in (params.logit_bias or {}).items()
            if 0 <= token < vocab_size
        }
        early = params.min_tokens > 0 and start.grammar is None
        self.stops = within(start.stop_token_ids if early else (), vocab_size)
        """[any] int64: barred before min_tokens"""
        words = start.bad_words_token_ids
        self.words = [w for w in words if w and 0 <= w[-1] < vocab_size and w[-1] not in ends]

    @property
    def bars(self) -> bool:
        """Whether allowed tokens depend on the output."""
        return bool(self.words) or self.stops.size > 0

    def record(self) -> np.ndarray:
        """Return an int32 array: the numbers of stop ids, bad words, longest word's tokens, and
        biases; stop ids; words, right-aligned, padded with -1; biased ids, ascending; biases; index
        of the first bias per BIAS_PART tokens, and the end.

        Only allowed tokens are listed.
        """
        stops, words = self.stops, self.words
        if self.allowed is not None:
            allowed = set(self.allowed.tolist())
            stops = stops[np.isin(stops, self.allowed)]
            words = [word for word in words if word[-1] in allowed]
        width = max(map(len, words), default=0)
        padded = np.full((len(words), width), -1, dtype=np.int32)
        for row, word in zip(padded, words, strict=True):
            row[width - len(word) :] = word
        ids = np.array(sorted(self.bias), dtype=np.int32)
        values = np.array([self.bias[int(token)] for token in ids], dtype=np.float32)
        parts = -(-self._vocab_size // BIAS_PART)
        begins = np.searchsorted(ids, np.arange(parts + 1) * BIAS_PART) if len(ids) else ids
        header = np.array([len(stops), len(words), width, len(ids)])
        return np.concatenate(
            [
                part.astype(np.int32)
                for part in (header, stops, padded.ravel(), ids, values.view(np.int32), begins)
            ]
        )

    def bits(self) -> np.ndarray:
        """Return [ceil(vocab_size / 32)] int32 of currently allowed tokens."""
        on = np.zeros(-(-self._vocab_size // 32) * 32, dtype=bool)
        on[: self._vocab_size] = self.allowed is None
        if self.allowed is not None:
            on[self.allowed] = True
        output = self._start.token_ids[self._start.num_prompt_tokens :]
        for word in self.words:
            if len(word) <= len(output) + 1 and output[len(output) + 1 - len(word) :] == word[:-1]:
                on[word[-1]] = False
        if len(output) < self._start.params.min_tokens:
            on[self.stops] = False
        return np.packbits(on, bitorder="little").view(np.int32)


def within(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]

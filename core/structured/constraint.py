"""One output on its way through its grammar: the thought before it, the end of it."""

from __future__ import annotations

import codecs
import functools
import time
from typing import NamedTuple

import numpy as np

from ..protocols import Content, GrammarMatcher
from ..types import SlotStart
from .thought import Thought

ANY = -1
"""A word of a bitmask with every bit set."""


class Ends(NamedTuple):
    """Where a bitmask says whether an output may end."""

    words: np.ndarray
    """[count] int64, the words that hold end tokens"""
    others: np.ndarray
    """[count] int32, the bits of these words that are other tokens'"""


class Constraint:
    """Follows a slot's sampled tokens and says which may come next.

    - While a thought is open every token is allowed but those that would end the output.
    - Where the grammar may end, end tokens are allowed; where it can only end, nothing else is.
    - With min_tokens or ignore_eos, ends are held back as long as anything else is possible.
    """

    def __init__(self, start: SlotStart, mask_timeout: float) -> None:
        """Walks through what was generated before a preemption. mask_timeout: seconds"""
        assert start.grammar is not None
        self._token_bytes = start.grammar.token_bytes
        self._encode = start.grammar.encode
        self._mask_timeout = mask_timeout
        self.matcher: GrammarMatcher | None = None
        self._eos = frozenset(start.grammar.eos_token_ids)
        self.ends = _ends((*start.grammar.eos_token_ids, *start.stop_token_ids))
        """The same object for all outputs with the same end tokens."""
        self._min_tokens = start.params.min_tokens
        self._ignore_eos = start.params.ignore_eos
        thought: Thought | None = start.grammar.thought
        self._opening = None if thought is None else thought.opening_ids
        """Tokens that may open a thought instead of the answer: asked for at the first token."""
        self._parser = None if thought is None else thought.parser()
        """The reasoning parser, until the thought is over."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_output = 0
        self.ended = False
        """An end token, or one that could not be chosen, was sampled: what follows is dropped."""
        self.failure: str | None = None
        """Why the request cannot go on."""
        try:
            self.matcher = start.grammar.grammar.matcher()
        except Exception as error:
            self._fail(error)
        for token_id in start.token_ids[start.num_prompt_tokens :]:
            self.advance(token_id)

    @property
    def steady(self) -> bool:
        """It is in its grammar: what the matcher says of tokens, ends apart, is what holds."""
        return self._parser is None and not self.ended and self.failure is None

    @property
    def holds_ends(self) -> bool:
        """Ends are held back now, as long as anything else is possible."""
        return self._ignore_eos or self._num_output < self._min_tokens

    def advance(self, token_id: int) -> None:
        """A token was sampled; -1: none could be."""
        if self.ended or self.failure is not None:
            return
        self._num_output += 1
        if token_id < 0:
            self.ended = True
            return
        try:
            self._take(token_id)
        except Exception as error:
            self._fail(error)

    def advanced(self, token_id: int, answer: bool | Exception) -> None:
        """Instead of `advance` where `steady`: what the matcher answered when given the token."""
        self._num_output += 1
        if answer is True:
            self.ended = token_id in self._eos
        else:
            self._fail(answer or ValueError(f"the grammar does not allow token {token_id}"))

    def _take(self, token_id: int) -> None:
        opening, self._opening = self._opening, None
        if self._parser is None:
            self._accept(token_id)
        elif opening is not None and token_id not in opening:
            self._parser = None
            self._accept(token_id)
        else:
            events = self._parser.feed(self._decoder.decode(self._token_bytes(token_id)))
            if self._parser.reasoning_ended:
                self._parser = None
                self._begin("".join(one.text for one in events if isinstance(one, Content)))

    def _begin(self, text: str) -> None:
        """The thought has ended; `text` is answer already, as when a tool call ended it."""
        if not text.strip() or self._encode is None:
            return
        for token_id in self._encode(text):
            assert self.matcher is not None
            if not self.matcher.accept([token_id]):
                raise ValueError(f"the thought ended with {text!r}, which the grammar forbids")

    def _accept(self, token_id: int) -> None:
        assert self.matcher is not None
        if not self.matcher.accept([token_id]):
            raise ValueError(f"the grammar does not allow token {token_id}")
        self.ended = token_id in self._eos

    def _fail(self, error: Exception) -> None:
        """A backend that raises ends this request alone."""
        self.failure = f"structured_outputs: {error}"

    def fill(self, row: np.ndarray) -> None:
        """Write which tokens may come next. row: [words] int32"""
        matcher = self.open(row)
        if matcher is None:
            return
        began = time.perf_counter()
        try:
            matcher.fill_bitmask(row)
        except Exception as error:
            self.close(row, error)
            return
        taken = time.perf_counter() - began
        self.close(row, None)
        if taken > self._mask_timeout:
            self.failure = (
                f"structured_outputs: the mask of one token took {taken:.2f} s, more than "
                f"mask_timeout ({self._mask_timeout} s)"
            )

    def open(self, row: np.ndarray) -> GrammarMatcher | None:
        """`fill` in two halves, where many rows are filled at once: what has to fill the row, and
        `close` with it then; None: it is written."""
        if self.ended or self.failure is not None:
            row.fill(ANY)
            return None
        if self._parser is not None and self._opening is None:
            row.fill(ANY)
            row[self.ends.words] &= self.ends.others
            return None
        return self.matcher

    def close(self, row: np.ndarray, error: Exception | None) -> None:
        """The matcher has filled the row, or failed."""
        if error is not None:
            self._fail(error)
            row.fill(ANY)
            return
        for token_id in self._opening or ():
            row.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        if self.holds_ends:
            hold_back(self.ends, row[None], [0])


def hold_back(ends: Ends, bits: np.ndarray, rows: list[int]) -> None:
    """Forbid the end tokens in these rows of [count, words], where a row allows anything else."""
    at = np.asarray(rows)[:, None], ends.words
    kept = bits[at]
    bits[at] = kept & ends.others
    for index in np.flatnonzero((kept & ~ends.others).any(axis=1)):
        row = bits[rows[index]]
        if not row.any():
            row[ends.words] = kept[index]


@functools.lru_cache(maxsize=256)
def _ends(token_ids: tuple[int, ...]) -> Ends:
    off: dict[int, int] = {}
    for token_id in token_ids:
        word = token_id >> 5
        off[word] = off.get(word, 0xFFFFFFFF) & ~(1 << (token_id & 31))
    words = np.fromiter(off, dtype=np.int64, count=len(off))
    others = np.fromiter(off.values(), dtype=np.uint32, count=len(off)).view(np.int32)
    return Ends(words, others)

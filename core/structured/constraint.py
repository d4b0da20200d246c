"""One output on its way through its grammar: the thought before it, the end of it."""

from __future__ import annotations

import codecs
import time

import numpy as np

from ..protocols import Content, GrammarMatcher
from ..types import SlotStart
from .thought import Thought

ANY = -1
"""A word of a bitmask with every bit set."""


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
        self._matcher: GrammarMatcher | None = None
        self._eos = frozenset(start.grammar.eos_token_ids)
        ends = sorted({*start.grammar.eos_token_ids, *start.stop_token_ids})
        self._end_words, self._no_ends = _words(ends)
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
            self._matcher = start.grammar.grammar.matcher()
        except Exception as error:
            self._fail(error)
        for token_id in start.token_ids[start.num_prompt_tokens :]:
            self.advance(token_id)

    @property
    def kind(self) -> type:
        """Of its matcher."""
        return type(self._matcher)

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
            assert self._matcher is not None
            if not self._matcher.accept([token_id]):
                raise ValueError(f"the thought ended with {text!r}, which the grammar forbids")

    def _accept(self, token_id: int) -> None:
        assert self._matcher is not None
        if not self._matcher.accept([token_id]):
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
            self._clear_ends(row)
            return None
        return self._matcher

    def close(self, row: np.ndarray, error: Exception | None) -> None:
        """The matcher has filled the row, or failed."""
        if error is not None:
            self._fail(error)
            row.fill(ANY)
            return
        for token_id in self._opening or ():
            row.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        if self._ignore_eos or self._num_output < self._min_tokens:
            kept = self._clear_ends(row)
            if (kept & ~self._no_ends).any() and not row.any():
                row[self._end_words] = kept

    def _clear_ends(self, row: np.ndarray) -> np.ndarray:
        """→ the words as they were"""
        kept = row[self._end_words]
        row[self._end_words] = kept & self._no_ends
        return kept


def _words(token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """→ the words of a bitmask that hold these tokens, and what they are with these bits off."""
    off: dict[int, int] = {}
    for token_id in token_ids:
        word = token_id >> 5
        off[word] = off.get(word, 0xFFFFFFFF) & ~(1 << (token_id & 31))
    words = np.fromiter(off, dtype=np.int64, count=len(off))
    return words, np.fromiter(off.values(), dtype=np.uint32, count=len(off)).view(np.int32)

"""The grammar of one output in progress: reasoning before it, end tokens after it."""

from __future__ import annotations

import codecs
import copy
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..protocols.grammars import GrammarMatcher
from ..protocols.parsers import Content
from ..step import CompiledGrammar, SlotStart
from ..token_lists import token_lists
from .spec import field_of

FORCED_SECONDS = 2e-3
"""If forced text took more processor time, an output is not asked for it again."""
MOST_FORCED = 256
"""Characters of forced text that become drafts."""
ANY = -1
"""A word of a bitmask with every bit set."""


class EndTokenBits(NamedTuple):
    words: np.ndarray
    """[count] int64, words with end tokens"""
    others: np.ndarray
    """[count] int32, other tokens' bits in these words"""


class _Mark(NamedTuple):
    """A constraint's state before drafts."""

    parser: Any
    opening_ids: tuple[int, ...] | None
    decoded: tuple[bytes, int]
    ended: bool
    num_output: int
    num_accepted: int


class Constraint:
    """Follows a slot's sampled tokens and computes which tokens may come next.

    - While reasoning is open, all tokens except end tokens are allowed.
    - Where the grammar may end, end tokens are allowed; where it can only end, no other token is.
    - With min_tokens or ignore_eos, end tokens are masked as long as another token is possible.
    - allowed_token_ids and bad_words hold, too; but where they leave nothing of a grammar that may
      end, it ends.
    """

    def __init__(self, start: SlotStart, compiled: CompiledGrammar, mask_timeout: float) -> None:
        """Replays output from before a preemption. mask_timeout: seconds"""
        assert start.grammar is not None
        structured = start.params.structured_outputs
        self._field = "structured_outputs" if structured is None else field_of(structured)
        self._token_bytes = compiled.token_bytes
        self._encode = compiled.encode
        self._mask_timeout = mask_timeout
        self.matcher: GrammarMatcher | None = None
        self._eos = frozenset(start.grammar.eos_token_ids)
        self.ends = _end_token_bits((*start.grammar.eos_token_ids, *start.stop_token_ids))
        """Shared by outputs with the same end tokens."""
        self._grammar_ends = _end_token_bits(tuple(start.grammar.eos_token_ids))
        self.lists = token_lists(start.params, start.bad_words_token_ids)
        """The request's own lists, which masks respect."""
        self._output: list[int] = []
        """With `lists`."""
        self._min_tokens = start.params.min_tokens
        self._ignore_eos = start.params.ignore_eos
        gate = start.grammar.reasoning_gate
        self._opening_ids = None if gate is None else gate.opening_ids
        """Before the first token: additional tokens that begin reasoning."""
        self._parser: Any = None
        """Until the reasoning ends."""
        if gate is not None:
            assert compiled.reasoning_parser is not None, "a reasoning gate without its parser"
            self._parser = compiled.reasoning_parser()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_output = 0
        self.ended = False
        """Whether an end token, or none, was sampled."""
        self.failure: str | None = None
        self.failed_param: str | None = None
        """The request's faulty field, or None."""
        self.drafts: Sequence[int] = ()
        """Tokens proposed to come next."""
        self._num_accepted = 0
        """Tokens that the matcher has accepted."""
        self._mark: _Mark | None = None
        self._slow = False
        """Whether forced text is not asked for any more."""
        try:
            self.matcher = compiled.grammar.matcher()
        except BaseException as error:
            self._fail(error)
        for token_id in start.token_ids[start.num_prompt_tokens :]:
            self.advance(token_id)

    @property
    def in_grammar(self) -> bool:
        """Whether the matcher's mask applies: after reasoning, before the end."""
        return self._parser is None and not self.ended and self.failure is None

    @property
    def masks_ends(self) -> bool:
        """Whether end tokens are masked while others are possible."""
        return self._ignore_eos or self._num_output < self._min_tokens

    def advance(self, token_id: int) -> None:
        """Advance by a sampled token, -1 for none."""
        if self.ended or self.failure is not None:
            return
        self._note(token_id)
        if token_id < 0:
            self.ended = True
            return
        try:
            self._apply(token_id)
        except BaseException as error:
            self._fail(error)

    def record_accept(self, token_id: int, result: bool | BaseException) -> None:
        """Record the matcher's result for a token, instead of `advance` if `in_grammar`."""
        self._note(token_id)
        if result is True:
            self._num_accepted += 1
            self.ended = token_id in self._eos
        else:
            self._fail(result or ValueError(f"the grammar does not allow token {token_id}"))

    def _note(self, token_id: int) -> None:
        self._num_output += 1
        if self.lists is not None:
            self._output.append(token_id)

    def _apply(self, token_id: int) -> None:
        opening_ids, self._opening_ids = self._opening_ids, None
        if self._parser is None:
            self._accept(token_id)
        elif opening_ids is not None and token_id not in opening_ids:
            self._parser = None
            self._accept(token_id)
        else:
            try:
                events = self._parser.feed(self._decoder.decode(self._token_bytes(token_id)))
            except Exception as error:
                self.failure = f"the reasoning parser failed: {type(error).__name__}: {error}"
                return
            if self._parser.reasoning_ended:
                self._parser = None
                self._accept_text("".join(e.text for e in events if isinstance(e, Content)))

    def _accept_text(self, text: str) -> None:
        """Accept content after the reasoning, such as a tool call's beginning."""
        if not text.strip() or self._encode is None:
            return
        for token_id in self._encode(text):
            assert self.matcher is not None
            if not self.matcher.accept([token_id]):
                raise ValueError(f"the reasoning ended with {text!r}, which the grammar forbids")
            self._num_accepted += 1

    def _accept(self, token_id: int) -> None:
        assert self.matcher is not None
        if not self.matcher.accept([token_id]):
            raise ValueError(f"the grammar does not allow token {token_id}")
        self._num_accepted += 1
        self.ended = token_id in self._eos

    # ------------------------------------------------------------ drafts

    @property
    def goes_back(self) -> bool:
        """Whether drafts can be followed and taken back."""
        return hasattr(self.matcher, "rollback")

    def forced_tokens(self) -> list[int]:
        """Return how the tokenizer divides text that must come next, but for its last token, which
        may be longer.
        """
        forced_text = getattr(self.matcher, "forced_text", None)
        if not self.in_grammar or forced_text is None or self._encode is None or self._slow:
            return []
        start = time.thread_time()
        try:
            text = forced_text()
        except BaseException as error:
            self._fail(error)
            return []
        # Some backends look at all of a long text each time.
        self._slow = time.thread_time() - start > FORCED_SECONDS
        return self._encode(text[:MOST_FORCED])[:-1] if text else []

    def mark(self) -> bool:
        """Remember the state, before drafts are followed; False, unchanged, if that is not
        possible.
        """
        if self.failure is not None or not self.goes_back:
            return False
        try:
            parser = copy.deepcopy(self._parser)
        except Exception:  # A plugin's parser may hold anything.
            return False
        self._mark = _Mark(
            self._parser, self._opening_ids, self._decoder.getstate(), self.ended,
            self._num_output, self._num_accepted,
        )  # fmt: skip
        self._parser = parser
        return True

    def go_back(self) -> None:
        """Return to the state of `mark`, whatever has happened since."""
        assert self._mark is not None, "nothing was marked"
        mark, self._mark = self._mark, None
        followed = self._num_accepted - mark.num_accepted
        self._parser, self._opening_ids = mark.parser, mark.opening_ids
        self._decoder.setstate(mark.decoded)
        self._num_output, self._num_accepted = mark.num_output, mark.num_accepted
        del self._output[mark.num_output :]
        self.ended, self.failure, self.failed_param = mark.ended, None, None
        if not followed:
            return
        try:
            self.matcher.rollback(followed)  # type: ignore[union-attr]
        except BaseException as error:
            self._fail(error)

    # ------------------------------------------------------------ masks

    def _fail(self, error: BaseException) -> None:
        """Fail only this request; Rust panics are no `Exception`."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        self._fail_for(f"{error}" or type(error).__name__)

    def _fail_for(self, reason: str) -> None:
        self.failure, self.failed_param = f"{self._field}: {reason}", self._field

    def fill(self, row: np.ndarray) -> None:
        matcher = self.begin_fill(row)
        if matcher is None:
            return
        start = time.thread_time()  # A busy host makes no mask slower by this clock.
        try:
            matcher.fill_bitmask(row)
        except BaseException as error:
            self.finish_fill(row, error)
            return
        seconds = time.thread_time() - start
        self.finish_fill(row, None)
        if not row.any():
            self.fail_empty(row)
        elif seconds > self._mask_timeout:
            self._fail_for(
                f"the mask of one token took {seconds:.2f} s of processor time, more than "
                f"mask_timeout ({self._mask_timeout} s)"
            )

    def begin_fill(self, row: np.ndarray) -> GrammarMatcher | None:
        """Return the matcher to fill the row before `finish_fill`, None if complete; for batched
        backend calls.
        """
        if self.ended or self.failure is not None:
            row.fill(ANY)
            return None
        if self._parser is not None and self._opening_ids is None:
            row.fill(ANY)
            row[self.ends.words] &= self.ends.others
            if self.lists is not None:
                self.lists.narrow(row, self._output)
                if not row.any():
                    self._fail_listed(row)
            return None
        return self.matcher

    def finish_fill(self, row: np.ndarray, error: BaseException | None) -> None:
        """Complete a row after the matcher, or its failure."""
        if error is not None:
            self._fail(error)
            row.fill(ANY)
            return
        for token_id in self._opening_ids or ():
            row.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        if self.lists is not None:
            self._narrow(row)
        if self.masks_ends and self.failure is None:
            mask_ends(self.ends, row[None], [0])

    def _narrow(self, row: np.ndarray) -> None:
        """Mask what the request's lists forbid, but for an end that alone is left."""
        assert self.lists is not None
        if not row.any():
            return  # The grammar's own dead end.
        words, others = self._grammar_ends
        ends = row[words] & ~others
        self.lists.narrow(row, self._output)
        if not row.any():
            row[words] = ends
            if not ends.any():
                self._fail_listed(row)

    def _fail_listed(self, row: np.ndarray) -> None:
        """Fail a request whose lists leave nothing that its grammar allows."""
        assert self.lists is not None
        param, *others = [*self.lists.fields, self._field]
        self.failure = (
            f"{param}: with {' and '.join(others) or 'the bad words of the checkpoint'}, no token "
            f"is left that may come next, after {self._num_output} tokens of output"
        )
        self.failed_param = param
        row.fill(ANY)

    def fail_empty(self, row: np.ndarray) -> None:
        """Fail a request whose row allows no token."""
        self._fail_for("the grammar led to a dead end: no token may come next")
        row.fill(ANY)


def allows(row: np.ndarray, token_id: int) -> bool:
    """Whether a row of a bitmask allows a token."""
    return bool(int(row[token_id >> 5]) >> (token_id & 31) & 1)


def mask_ends(ends: EndTokenBits, bits: np.ndarray, rows: list[int]) -> None:
    """Mask end tokens in these rows of [count, words], unless nothing else is allowed."""
    index = np.asarray(rows)[:, None], ends.words
    before = bits[index]
    bits[index] = before & ends.others
    for number in np.flatnonzero((before & ~ends.others).any(axis=1)):
        row = bits[rows[number]]
        if not row.any():
            row[ends.words] = before[number]


@functools.lru_cache(maxsize=256)
def _end_token_bits(token_ids: tuple[int, ...]) -> EndTokenBits:
    masks: dict[int, int] = {}
    for token_id in token_ids:
        word = token_id >> 5
        masks[word] = masks.get(word, 0xFFFFFFFF) & ~(1 << (token_id & 31))
    words = np.fromiter(masks, dtype=np.int64, count=len(masks))
    others = np.fromiter(masks.values(), dtype=np.uint32, count=len(masks)).view(np.int32)
    return EndTokenBits(words, others)

"""Grammars by llguidance: nothing is precomputed and every step is bounded, so any grammar is safe
to try."""

from __future__ import annotations

import codecs
import functools
import importlib.util
import itertools
import json
import os
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ...core.grammars.schemas.keywords import subschemas
from ...core.protocols.grammars import GrammarSpec, Vocabulary
from .lark_tags import lark_of, unread
from .structural_tags import read

MAX_ITEMS_IN_ROW = 10_000
"""Most parser items per position: enough for a schema with some thousand optional properties."""
THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Threads that fill masks of many rows; more would compete with the event loop."""
MORE_ROOTS_SECONDS = 0.03
"""Most seconds for compiling a grammar again to fill its masks in parallel."""

_BOUNDS = (
    ("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1),
)  # fmt: skip
_LARGEST = 2**63 - 1

SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (2, 4, 6, 8, 10, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
]
"""Token sets that a mask takes together if a grammar allows them all: the package's own, and
shorter pieces of strings, for those near their greatest length."""


class LLGuidance:
    """Covers most of JSON Schema and refuses keywords that it cannot enforce.

    Its limits on lexer states, grammar size and items per step bound time and memory.
    """

    bounded: ClassVar[bool] = True

    @classmethod
    def unavailable(cls) -> str | None:
        """None when the package is installed."""
        if importlib.util.find_spec("llguidance") is None:
            return (
                "the package llguidance, which Jackfield depends on, is not installed (pip install "
                "llguidance; 'jackfield[structured]' has xgrammar, too)"
            )
        return None

    @classmethod
    def refusal(cls, spec: GrammarSpec) -> str | None:
        """Return why a grammar cannot be read; None if it can."""
        if spec.kind == "grammar" and "::=" in spec.text:
            return "it reads Lark's syntax, not GBNF's (::=)"
        if spec.kind == "json":
            return _saturated(json.loads(spec.text))
        if spec.kind == "structural_tag":
            try:
                tag = read(spec.text)
                return unread(tag) or _saturated(tag)
            except ValueError as error:
                return str(error)
        return None

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._llguidance = llguidance
        self._eos = vocabulary.eos_token_ids
        self._special_tokens = vocabulary.special_tokens
        self._options: Any = {"coerce_one_of": True}
        if vocabulary.compact_json:
            self._options |= {
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
            }
        else:
            self._options["whitespace_pattern"] = r"[\x20\x0A\x0D\x09]{1,32}"
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=MAX_ITEMS_IN_ROW, verbose_errors=False
        )
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(
            wrapper,
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.eos_token_ids),
            slices=SLICES,
        )

    def compile(self, spec: GrammarSpec) -> LLGuidanceGrammar:
        """Compile a grammar. Raises ValueError describing the error in it."""
        text = self._grammar(spec)
        roots = [self._root(text)]
        until = time.monotonic() + MORE_ROOTS_SECONDS
        while len(roots) < THREADS and time.monotonic() < until:
            roots.append(self._root(text))
        return LLGuidanceGrammar(roots, self._eos)

    def _root(self, grammar: str) -> Any:
        matcher = self._llguidance.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=self._limits
        )
        if matcher.is_error():
            raise ValueError(_first_line(matcher.get_error()))
        return matcher

    def _grammar(self, spec: GrammarSpec) -> str:
        matcher_class = self._llguidance.LLMatcher
        match spec.kind:
            case "json":
                return self._schema(spec.text)
            case "json_object":
                return self._schema('{"type":"object"}')
            case "regex":
                return matcher_class.grammar_from_regex(spec.text)
            case "choice":
                options = " | ".join(_quoted(option) for option in json.loads(spec.text))
                return matcher_class.grammar_from_lark(f"start: {options}")
            case "grammar":
                return matcher_class.grammar_from_lark(spec.text)
            case "structural_tag":
                return matcher_class.grammar_from_lark(self._tags(spec.text))
        raise ValueError(f"no such kind: {spec.kind}")

    def _schema(self, text: str) -> str:
        matcher_class = self._llguidance.LLMatcher
        return matcher_class.grammar_from_json_schema(text, overrides=self._options)

    def _tags(self, text: str) -> str:
        return lark_of(read(text), self._special_tokens, self._options)


class _Vocabulary:
    """The vocabulary in llguidance's form."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = vocabulary.token_bytes
        self.special_token_ids: list[int] = []
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class LLGuidanceGrammar:
    """Matchers in the initial state, which requests copy.

    Several, because copies of one share a lexer and its lock.
    """

    def __init__(self, roots: Sequence[Any], eos_token_ids: tuple[int, ...]) -> None:
        self._roots = roots
        self._next = itertools.cycle(range(len(roots)))
        self._eos = frozenset(eos_token_ids)

    def matcher(self) -> LLGuidanceMatcher:
        root = next(self._next)
        return LLGuidanceMatcher(self._roots[root].deep_copy(), root, self._eos)


class LLGuidanceMatcher:
    """The state of one output. The end token is not passed to the package, whose acceptance depends
    on how it stopped.
    """

    def __init__(self, matcher: Any, root: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._root = root
        self._eos = eos_token_ids
        self._terminated = False

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Raises RuntimeError if a limit was reached."""
        return all(self._accept(token_id) for token_id in token_ids)

    def _accept(self, token_id: int) -> bool:
        matcher = self._matcher
        if self._terminated:
            return False
        if token_id in self._eos:
            self._terminated = matcher.is_accepting()
            return self._terminated
        if matcher.try_consume_tokens([token_id]) == 1:
            return True
        if matcher.is_error():
            raise RuntimeError(_first_line(matcher.get_error()))
        return False

    @classmethod
    def accept_each(
        cls, matchers: Sequence[LLGuidanceMatcher], token_ids: Sequence[int]
    ) -> list[bool | Exception]:
        """Accept one token per matcher; too fast for threads to pay off. An unaccepted token is an
        error.
        """
        results: list[bool | Exception] = []
        for matcher, token_id in zip(matchers, token_ids, strict=True):
            if matcher._terminated or token_id in matcher._eos:
                results.append(matcher._accept(token_id))
            elif matcher._matcher.consume_token(token_id):
                results.append(True)
            else:
                results.append(RuntimeError(_first_line(matcher._matcher.get_error())))
        return results

    def fill_bitmask(self, row: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise RuntimeError(_first_line(self._matcher.get_error()))

    @classmethod
    def fill_bitmasks(
        cls, matchers: Sequence[LLGuidanceMatcher], bits: np.ndarray, rows: Sequence[int]
    ) -> list[Exception | None]:
        """Fill many masks on the package's threads, without the interpreter lock.

        bits: [count, ceil(size / 32)] int32
        """
        pairs = [(matcher._matcher, row) for matcher, row in zip(matchers, rows, strict=True)]
        # Each thread gets neighbours: rows that wait for each other go to one thread.
        order = sorted(range(len(pairs)), key=lambda place: matchers[place]._root)
        _executor().unsafe_compute_mask_ptr(
            [pairs[place] for place in order], bits.ctypes.data, bits.strides[0], bits.shape[0]
        )
        return [
            RuntimeError(_first_line(matcher.get_error())) if matcher.is_error() else None
            for matcher, _ in pairs
        ]

    def is_terminated(self) -> bool:
        return self._terminated

    def forced_text(self) -> str:
        forced: bytes = b"" if self._terminated else self._matcher.compute_ff_bytes()
        try:
            return codecs.getincrementaldecoder("utf-8")().decode(forced)
        except UnicodeDecodeError:
            return ""  # In the middle of a character.

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens - self._terminated)
        self._terminated = False


def _saturated(schema: Any) -> str | None:
    """Return the bound of an integer that admits no 64-bit value: the package would use the
    nearest. A bound that also admits larger ones works.
    """
    for part in subschemas(schema):
        if part.get("type") == "number":
            continue
        for name, sign in _BOUNDS:
            bound = part.get(name)
            if isinstance(bound, int | float) and sign * bound > _LARGEST:
                return f"{name} {bound} is beyond integers of 64 bits"
    return None


@functools.cache
def _executor() -> Any:
    import llguidance

    return llguidance.LLExecutor(THREADS)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _first_line(message: str) -> str:
    """Return the first line of an error; of an expression's, with the fault."""
    lines = message.strip().splitlines()
    if not lines:
        return "it exceeded its limits"
    if lines[0].startswith("NoExtension"):
        return "the grammar led to a dead end: nothing may come next"
    if lines[0].endswith(":") and len(lines) > 1:
        reasons = [line.strip() for line in lines if line.startswith("error:")]
        return " ".join((lines[0], lines[1].strip()[:200], *reasons))[:500]
    return lines[0][:500]

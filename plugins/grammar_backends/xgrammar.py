"""Grammars by xgrammar: masks precomputed at compile time, so that steps are cheap."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ...core.grammars.schemas.keywords import subschemas
from ...core.grammars.spec import tag_formats
from ...core.protocols.grammars import GrammarSpec, Vocabulary
from .structural_tags import read
from .xgrammar_refusals import has_free_text, misread, tag_format, unsupported, unsupported_tag

MAX_WHITESPACE = 32
"""Most whitespace characters between two parts of a JSON text; bounds repeated newlines."""
LONGEST_EXPRESSION = 128
"""Longest strings written as expressions: longer ones compile slowly."""
THREADS = max(1, min(8, (os.cpu_count() or 1) - 2))
"""Threads that fill masks of many rows. The package starts new ones at each call."""

_BESIDE_LENGTHS = frozenset(
    ("enum", "const", "format", "pattern", "anyOf", "oneOf", "$ref", "$recursiveRef")
)
"""Keywords that constrain more of a string than its length."""

_NOT_IN_LENGTHS = r'"\\\r\n'
"""Characters that the package never allows in strings with a length: JSON's escapes."""

_ANY_TEXT = r'[^"\\\x01-\x1F]*'


class XGrammar:
    bounded: ClassVar[bool] = False

    @classmethod
    def unavailable(cls) -> str | None:
        if importlib.util.find_spec("xgrammar") is None:
            return (
                "the package xgrammar is not installed (pip install xgrammar, or with Jackfield: "
                "'jackfield[structured]')"
            )
        return None

    @classmethod
    def refusal(cls, spec: GrammarSpec) -> str | None:
        """Return the first keyword that it would not enforce."""
        if spec.kind == "json":
            return unsupported(json.loads(spec.text))
        if spec.kind == "structural_tag":
            return unsupported_tag(spec.text)
        return misread(spec.text) if spec.kind == "regex" else None

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        self._vocabulary = vocabulary
        self._compact = vocabulary.compact_json
        info = xgrammar.TokenizerInfo(
            vocabulary.token_bytes,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_token_ids),
        )
        self._clean = _clean_tokens(vocabulary)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar:
        try:
            compiled = self._compile(spec)
        except (RuntimeError, TypeError) as error:
            raise ValueError(_first_line(error)) from None
        closed = spec.kind in ("json", "json_object") or (
            spec.kind == "structural_tag" and not has_free_text({"format": tag_format(spec.text)})
        )
        clean = self._clean if closed else None
        return XGrammarGrammar(self._xgrammar, compiled, clean)

    def _compile(self, spec: GrammarSpec) -> Any:
        compiler = self._compiler
        match spec.kind:
            case "json":
                return self._schema(spec.text)
            case "json_object":
                return self._schema('{"type":"object"}')
            case "regex":
                return compiler.compile_regex(spec.text)
            case "choice":
                options = " | ".join(_quoted(option) for option in json.loads(spec.text))
                return compiler.compile_grammar(f"root ::= {options}")
            case "grammar" if "::=" in spec.text:
                return compiler.compile_grammar(spec.text)
            case "grammar":
                return compiler.compile_lark(spec.text)
            case "structural_tag":
                return compiler.compile_structural_tag(self._tag(spec.text))

    def _schema(self, text: str) -> Any:
        schema = json.loads(text)
        return self._compiler.compile_json_schema(
            json.dumps(schema) if _write_expressions(schema) else text,
            any_whitespace=not self._compact,
            max_whitespace_cnt=None if self._compact else MAX_WHITESPACE,
        )

    def _tag(self, text: str) -> str:
        tag = {"type": "structural_tag", "format": read(text)}
        for part in tag_formats(tag):
            if part.get("type") == "json_schema" and not self._compact:
                part["max_whitespace_cnt"] = MAX_WHITESPACE
            if part.get("type") == "json_schema":
                _write_expressions(part.get("json_schema"))
            texts = [part.get(key) for key in ("begin", "end", "value", "separator")]
            for token in self._vocabulary.special_tokens:
                if token and any(isinstance(text, str) and token in text for text in texts):
                    raise ValueError(f"the special token {token} in a structural tag")
        return json.dumps(tag)


class XGrammarGrammar:
    def __init__(self, xgrammar: Any, compiled: Any, clean: np.ndarray | None) -> None:
        """clean: [ceil(size / 32)] int32, the tokens that masks may allow; None: all."""
        self._xgrammar = xgrammar
        self._compiled = compiled
        self._clean = clean

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._xgrammar.GrammarMatcher(self._compiled), self._clean)


class XGrammarMatcher:
    def __init__(self, matcher: Any, clean: np.ndarray | None) -> None:
        self._matcher = matcher
        self._clean = clean

    def accept(self, token_ids: Sequence[int]) -> bool:
        accept = self._matcher.accept_token
        for token_id in token_ids:
            if not accept(token_id):
                return False
        return True

    @classmethod
    def accept_each(
        cls, matchers: Sequence[XGrammarMatcher], token_ids: Sequence[int]
    ) -> list[bool]:
        """Accept one token per matcher, releasing the interpreter lock once."""
        import xgrammar

        raw = [matcher._matcher for matcher in matchers]
        return list(xgrammar.BatchGrammarMatcher.batch_accept_token(raw, list(token_ids)))

    def fill_bitmask(self, row: np.ndarray) -> None:
        self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0)
        if self._clean is not None:
            np.bitwise_and(row, self._clean, out=row)

    @classmethod
    def fill_bitmasks(
        cls, matchers: Sequence[XGrammarMatcher], bits: np.ndarray, rows: Sequence[int]
    ) -> list[Exception | None]:
        """Fill many masks on the package's threads, without the interpreter lock. Its errors name
        no row: after one, fill each row separately.

        bits: [count, ceil(size / 32)] int32
        """
        raw = [matcher._matcher for matcher in matchers]
        together = _together(threading.get_ident(), min(THREADS, len(raw)))
        together.batch_fill_next_token_bitmask(raw, bits, list(rows))
        cleans = {id(matcher._clean) for matcher in matchers}
        if len(rows) == len(bits) and len(cleans) == 1:
            if (clean := matchers[0]._clean) is not None:
                np.bitwise_and(bits, clean, out=bits)
        else:
            for matcher, row in zip(matchers, rows, strict=True):
                if matcher._clean is not None:
                    bits[row] &= matcher._clean
        return [None] * len(raw)

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def forced_text(self) -> str:
        if self._matcher.is_terminated():
            return ""
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError:
            return ""  # In the middle of a character.

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)


@functools.lru_cache(maxsize=64)
def _together(thread: int, threads: int) -> Any:
    """Return a thread's own batch matcher."""
    import xgrammar

    return xgrammar.BatchGrammarMatcher(threads)


def _write_expressions(schema: Any) -> bool:
    """Rewrite in place: strings of bounded length to equivalent expressions, and patterns, which
    the package matches against the whole string, to patterns of all strings that contain a match.
    Return whether any was rewritten.

    Near a length bound, the package takes tens of milliseconds per mask; masks of expressions are
    computed at compile time.
    """
    written = False
    for part in list(subschemas(schema)):
        least, most = part.get("minLength", 0), part.get("maxLength", LONGEST_EXPRESSION + 1)
        pattern = part.get("pattern")
        if isinstance(pattern, str) and (whole := _whole(pattern)) != pattern:
            part["pattern"] = whole
            written = True
        named = part.get("patternProperties")
        if isinstance(named, dict) and any(_whole(key) != key for key in named):
            part["patternProperties"] = {_whole(key): value for key, value in named.items()}
            written = True
        if part.get("type") != "string" or _BESIDE_LENGTHS & part.keys():
            continue
        if least <= most <= LONGEST_EXPRESSION:
            del part["maxLength"]
            part.pop("minLength", None)
            part["pattern"] = f"^[^{_NOT_IN_LENGTHS}]{{{least},{most}}}$"
            written = True
    return written


def _whole(pattern: str) -> str:
    """Return an expression for all strings that contain a match of `pattern`; itself if anchored at
    both ends.
    """
    begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    if begin and end:
        return pattern
    body = pattern.removeprefix("^").removesuffix("$") if begin or end else pattern
    return f"^{'' if begin else _ANY_TEXT}({body}){'' if end else _ANY_TEXT}$"


def _clean_tokens(vocabulary: Vocabulary) -> np.ndarray:
    """Tokens without control characters except newlines: [ceil(size / 32)] int32

    Strings with minLength or maxLength would allow raw control characters (not newlines), which
    JSON forbids. This also excludes tabs between JSON's parts.
    """
    barred = bytes(set(range(32)) - {10, 13})
    bits = np.zeros(-(-vocabulary.size // 32) * 32, dtype=np.uint8)
    for token_id, written in enumerate(vocabulary.token_bytes):
        bits[token_id] = written.translate(None, barred) == written
    return np.packbits(bits, bitorder="little").view(np.int32)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _first_line(error: Exception) -> str:
    """Return the message without its time and source file."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return line.partition("] ")[2].partition(": ")[2] or line

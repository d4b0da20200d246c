"""The kit of grammar backends: the backends in the box pass it, and planted bugs do not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from jackfield.core.protocols.grammars import GrammarSpec, Vocabulary
from jackfield.plugins.conformance.grammar_cases import FIRST_EOS, SIZE
from jackfield.plugins.conformance.grammars import GrammarBackendKit
from jackfield.plugins.grammar_backends.llguidance import LLGuidance, LLGuidanceMatcher

pytest.importorskip("llguidance")


class TestLLGuidance(GrammarBackendKit):
    name = "llguidance"


class TestXGrammar(GrammarBackendKit):
    name = "xgrammar"


class Matcher:
    """Around a sound one; each bug changes one thing."""

    def __init__(self, inner: LLGuidanceMatcher) -> None:
        self.inner = inner

    def accept(self, token_ids: Sequence[int]) -> bool:
        return self.inner.accept(token_ids)

    def fill_bitmask(self, row: np.ndarray) -> None:
        self.inner.fill_bitmask(row)

    def is_terminated(self) -> bool:
        return self.inner.is_terminated()

    def rollback(self, num_tokens: int) -> None:
        self.inner.rollback(num_tokens)

    def forced_text(self) -> str:
        return self.inner.forced_text()


class Compiled:
    def __init__(self, inner: Any, matcher: type) -> None:
        self.inner, self.kind = inner, matcher

    def matcher(self) -> Any:
        return self.kind(self.inner.matcher())


class Subject(LLGuidance):
    """No bug yet."""

    matcher: ClassVar[type] = Matcher

    def compile(self, spec: GrammarSpec) -> Any:
        return Compiled(super().compile(spec), self.matcher)


def allow(row: np.ndarray, token_id: int, *, allowed: bool = True) -> None:
    bit = np.uint32(1 << (token_id & 31))
    words = row.view(np.uint32)
    words[token_id >> 5] = words[token_id >> 5] | bit if allowed else words[token_id >> 5] & ~bit


class EndsAnywhere(Matcher):
    def fill_bitmask(self, row: np.ndarray) -> None:
        self.inner.fill_bitmask(row)
        allow(row, FIRST_EOS)


class OneEndToken(Matcher):
    def fill_bitmask(self, row: np.ndarray) -> None:
        self.inner.fill_bitmask(row)
        allow(row, FIRST_EOS + 1, allowed=False)


class BitsPastTheVocabulary(Matcher):
    def fill_bitmask(self, row: np.ndarray) -> None:
        self.inner.fill_bitmask(row)
        allow(row, SIZE + 1)


class AddsToTheRow(Matcher):
    def fill_bitmask(self, row: np.ndarray) -> None:
        before = row.copy()
        self.inner.fill_bitmask(row)
        np.bitwise_or(row, before, out=row)


class TokensWithoutBytes(Matcher):
    def fill_bitmask(self, row: np.ndarray) -> None:
        self.inner.fill_bitmask(row)
        allow(row, FIRST_EOS + 2)


class NoBytesBeyondAscii(Matcher):
    def fill_bitmask(self, row: np.ndarray) -> None:
        self.inner.fill_bitmask(row)
        row.view(np.uint32)[4:8] = 0


class AcceptsAnything(Matcher):
    def accept(self, token_ids: Sequence[int]) -> bool:
        self.inner.accept(token_ids)
        return True


class RaisesAtAWrongToken(Matcher):
    def accept(self, token_ids: Sequence[int]) -> bool:
        if not self.inner.accept(token_ids):
            raise ValueError("no such token here")
        return True


class AcceptsTheFirstOnly(Matcher):
    def accept(self, token_ids: Sequence[int]) -> bool:
        return self.inner.accept(token_ids[:1])


class EndsWithoutAnEndToken(Matcher):
    def is_terminated(self) -> bool:
        row = np.empty(-(-SIZE // 32), dtype=np.int32)
        self.inner.fill_bitmask(row)
        return bool(row.view(np.uint32)[FIRST_EOS >> 5] >> np.uint32(FIRST_EOS & 31) & 1)


class NeverTerminated(Matcher):
    def is_terminated(self) -> bool:
        return False


class RollsBackOneTooFew(Matcher):
    def rollback(self, num_tokens: int) -> None:
        self.inner.rollback(num_tokens - 1)


class ForcesTooMuch(Matcher):
    def forced_text(self) -> str:
        return self.inner.forced_text() + "x"


class FillsRowsInOrder(Matcher):
    @classmethod
    def fill_bitmasks(
        cls, matchers: Sequence[Any], bits: np.ndarray, rows: Sequence[int]
    ) -> list[None]:
        for row, matcher in enumerate(matchers):
            matcher.fill_bitmask(bits[row])
        return [None] * len(rows)


class ForgetsTheLast(Matcher):
    @classmethod
    def accept_each(cls, matchers: Sequence[Any], token_ids: Sequence[int]) -> list[bool]:
        outputs = [
            first.accept([token])
            for first, token in zip(matchers[:-1], token_ids[:-1], strict=True)
        ]
        return [*outputs, True]


MATCHERS = (
    EndsAnywhere, OneEndToken, BitsPastTheVocabulary, AddsToTheRow, TokensWithoutBytes,
    NoBytesBeyondAscii, AcceptsAnything, RaisesAtAWrongToken, AcceptsTheFirstOnly,
    EndsWithoutAnEndToken, NeverTerminated, RollsBackOneTooFew, ForcesTooMuch,
    FillsRowsInOrder, ForgetsTheLast,
)  # fmt: skip


class OneMatcherForAll(Subject):
    def compile(self, spec: GrammarSpec) -> Any:
        grammar = super().compile(spec)
        matcher = grammar.matcher()
        grammar.matcher = lambda: matcher
        return grammar


class OneGrammarForAll(Subject):
    def compile(self, spec: GrammarSpec) -> Any:
        cache = vars(self).setdefault("made", {})
        return cache.setdefault(spec.kind, super().compile(spec))


class RaisesRuntimeErrors(Subject):
    def compile(self, spec: GrammarSpec) -> Any:
        try:
            return super().compile(spec)
        except ValueError as error:
            raise RuntimeError(str(error)) from None


class SaysNoReason(Subject):
    def compile(self, spec: GrammarSpec) -> Any:
        try:
            return super().compile(spec)
        except ValueError:
            raise ValueError from None


class PassesOver(Subject):
    """Keywords that it does not know."""

    keywords: ClassVar[tuple[str, ...]] = ("maximum",)

    def compile(self, spec: GrammarSpec) -> Any:
        if spec.kind == "json" and isinstance(schema := json.loads(spec.text), dict):
            subset = {key: value for key, value in schema.items() if key not in self.keywords}
            spec = GrammarSpec("json", json.dumps(subset))
        return super().compile(spec)


class PassesOverLengths(PassesOver):
    keywords = ("maxLength",)


class PassesOverUniqueItems(PassesOver):
    keywords = ("uniqueItems",)


class PassesOverNot(PassesOver):
    keywords = ("not",)


class AlwaysFlexible(Subject):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self._options = {"whitespace_flexible": True}


class AnyJsonObject(Subject):
    def compile(self, spec: GrammarSpec) -> Any:
        return super().compile(GrammarSpec("json", "{}") if spec.kind == "json_object" else spec)


class RefusalRaises(Subject):
    @classmethod
    def refusal(cls, spec: GrammarSpec) -> str | None:
        if spec.kind == "json":
            json.loads(spec.text).get("type")
        return super().refusal(spec)


class RefusesWithTrue(Subject):
    @classmethod
    def refusal(cls, spec: GrammarSpec) -> Any:
        return super().refusal(spec) is not None or (spec.kind == "regex" or None)


class HoldsNothing(Subject):
    @classmethod
    def refusal(cls, spec: GrammarSpec) -> str | None:
        return "not today"


def _local() -> type:
    class Local(Subject):
        pass

    return Local


BACKENDS: tuple[type, ...] = (
    OneMatcherForAll, OneGrammarForAll, RaisesRuntimeErrors, SaysNoReason, PassesOver,
    PassesOverLengths, PassesOverUniqueItems, PassesOverNot, AlwaysFlexible, AnyJsonObject,
    RefusalRaises, RefusesWithTrue, HoldsNothing, _local(),
)  # fmt: skip
MUTANTS: dict[str, type] = {
    **{kind.__name__: type(kind.__name__, (Subject,), {"matcher": kind}) for kind in MATCHERS},
    **{kind.__name__: kind for kind in BACKENDS},
}


def failures(kind: type) -> Iterator[str]:
    """The kit's tests that a backend fails, one after the other. The sandbox is for those alone
    that only it catches."""
    kit = type("Kit", (GrammarBackendKit,), {"backend_class": lambda self: kind})()
    names = [name for name in dir(kit) if name.startswith("test_") and "sandbox" not in name]
    if "<locals>" in kind.__qualname__:
        names.append("test_the_sandbox_finds_it")
    for name in names:
        try:
            getattr(kit, name)()
        except (Exception, pytest.fail.Exception):
            yield name


def test_the_subject_of_the_mutants_is_sound() -> None:
    assert not list(failures(Subject))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught(name: str) -> None:
    assert next(failures(MUTANTS[name]), None)

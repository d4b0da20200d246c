"""The kit of grammar backends: masks against enumerated languages, keywords enforced or refused.

What it asks beyond the docstrings of `core/protocols/`:

- A kind of grammar, a keyword or a syntax is enforced or refused, by `refusal` or a ValueError of
  `compile`; it is never passed over.
- A mask allows nothing that no right output goes on with, whether it ends inside a character or
  not; and of every byte that a right output may go on with, it allows a token that begins so. More
  than one token need not be allowed where the text is already certain.
- `accept` may take more tokens than the mask allows, where their bytes are right; an end token it
  takes exactly where the mask allows it.
- Texts of an `enum` or `const` are written in one way.
- `refusal` and `unavailable` answer for any text in one line, and do not raise.
- The class is one that its module and qualified name lead to: the sandbox finds it by them.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ...core.grammars.sandbox.compile_sandbox import CompileSandbox
from ...core.protocols.grammars import Grammar, GrammarMatcher, GrammarSpec
from .grammar_cases import (
    FIRST_EOS,
    HELD,
    LANGUAGES,
    ODD,
    SIZE,
    WALKED,
    WRONG,
    vocabulary,
)
from .kit import Kit


class GrammarBackendKit(Kit):
    """Subclass it, set `name`, and pytest runs it."""

    kind = "structured_backend"

    def backend_class(self) -> Any:
        """The class registered under `name`, or another one to test instead."""
        return self.registered()

    # ------------------------------------------------------------ before anything is compiled

    def test_says_whether_it_can_be_used(self) -> None:
        kind = self.backend_class()
        reason = kind.unavailable()
        assert reason is None or (isinstance(reason, str) and reason.strip() and "\n" not in reason)
        assert isinstance(kind.bounded, bool)

    def test_refuses_with_a_reason_and_never_raises(self) -> None:
        kind = self.backend_class()
        schemas = (GrammarSpec("json", json.dumps(schema)) for schema, *_ in HELD)
        for spec in (*(spec for spec, _ in LANGUAGES), *schemas, *WRONG, *ODD):
            reason = kind.refusal(spec)
            assert reason is None or (isinstance(reason, str) and reason.strip()), spec
            assert reason is None or "\n" not in reason, spec

    def test_wrong_grammars_are_value_errors_with_a_reason(self) -> None:
        for spec in WRONG:
            if self._kind().refusal(spec) is None:
                with pytest.raises(ValueError) as caught:
                    self._backend().compile(spec)
                assert len(str(caught.value)) >= 3, f"{spec}: no reason"

    def test_odd_grammars_are_held_or_value_errors(self) -> None:
        for spec in ODD:
            grammar = self._grammar(spec)
            if grammar is not None:
                _mask(grammar.matcher())

    def test_the_sandbox_finds_it(self) -> None:
        """The sandbox finds the class by module and qualified name, in another process."""

        async def check() -> None:
            sandbox = CompileSandbox(
                self._kind(), vocabulary(), compile_timeout=60, mask_timeout=60,
                memory_bytes=4 << 30,
            )  # fmt: skip
            try:
                for spec, _ in self._languages():
                    await sandbox.check(spec)
                    break
            finally:
                await sandbox.close()

        asyncio.run(check())

    # ------------------------------------------------------------ masks

    def test_masks_are_exactly_what_the_language_allows(self) -> None:
        """Compare masks at every place in every output with the enumerated outputs."""
        num_checked = 0
        for spec, outputs in self._languages():
            num_checked += 1
            texts = [output.encode() for output in outputs]
            for prefix in sorted({text[:end] for text in texts for end in range(len(text) + 1)}):
                matcher = self._grammar(spec).matcher()
                assert matcher.accept(list(prefix)), f"{spec}: {prefix!r} is not accepted"
                _compare(_mask(matcher), texts, prefix, f"{spec} after {prefix!r}")
        assert num_checked, "none of the kit's grammars is enforced"

    def test_every_bit_of_a_row_is_written_and_nothing_else(self) -> None:
        words = -(-SIZE // 32)
        for spec, _ in self._languages():
            grammar = self._grammar(spec)
            rows = []
            for before in (0, -1):
                around = np.full((3, words), before, dtype=np.int32)
                grammar.matcher().fill_bitmask(around[1])
                assert (around[0] == before).all() and (around[2] == before).all(), "past its row"
                rows.append(around[1].copy())
            assert (rows[0] == rows[1]).all(), f"{spec}: some bits are left as they were"
            bits = np.unpackbits(rows[0].view(np.uint8), bitorder="little")
            assert not bits[SIZE:].any(), "bits past the vocabulary"

    def test_masks_and_accept_agree_on_every_token(self) -> None:
        vocab = vocabulary()
        for spec, texts, start in self._places():
            grammar = self._grammar(spec)
            matcher = grammar.matcher()
            assert matcher.accept(list(start))
            bits = _mask(matcher)
            for token, written in enumerate(vocab.token_bytes):
                other = grammar.matcher()
                assert other.accept(list(start))
                accepted = other.accept([token])
                assert isinstance(accepted, bool), f"{spec}: accept returns {accepted!r}"
                where = (
                    f"{spec}: token {token} after {start!r}: mask {bits[token]}, accept {accepted}"
                )
                if bits[token] or not written:
                    assert accepted is bool(bits[token]), where
                elif accepted:
                    assert any(text.startswith(start + written) for text in texts), where

    def test_tokens_are_as_good_as_their_bytes(self) -> None:
        vocab = vocabulary()
        for spec, outputs in self._languages():
            for output in outputs:
                first, other = (self._grammar(spec).matcher() for _ in range(2))
                assert first.accept(vocab.encode(output)) and other.accept(list(output.encode()))
                assert (_mask(first) == _mask(other)).all(), f"{spec}: {output!r}"

    # ------------------------------------------------------------ ends

    def test_every_end_token_ends_an_output_where_it_may_end(self) -> None:
        for spec, outputs in self._languages():
            tokens = list(outputs[0].encode())
            for end in vocabulary().eos_token_ids:
                matcher = self._grammar(spec).matcher()
                assert not matcher.is_terminated()
                assert matcher.accept(tokens)
                assert not matcher.is_terminated(), f"{spec}: terminated before an end token"
                assert matcher.accept([end]), f"{spec}: does not accept end token {end}"
                assert matcher.is_terminated(), f"{spec}: not terminated after end token {end}"

    def test_an_end_token_too_early_is_not_accepted(self) -> None:
        for spec, _ in self._languages():
            matcher = self._grammar(spec).matcher()
            assert matcher.accept([vocabulary().eos_token_ids[0]]) is False
            assert not matcher.is_terminated()

    def test_walks_at_random_end_in_what_the_schema_says(self) -> None:
        spec = GrammarSpec("json", json.dumps(WALKED))
        grammar = self._grammar(spec)
        if grammar is None:
            return
        num_complete = 0
        for seed in range(12):
            text = _walk(grammar, random.Random(seed))
            if text is not None:
                num_complete += 1
                value = json.loads(text)
                assert list(value) == ["name", "tags"] and isinstance(value["name"], str)
                assert len(value["tags"]) <= 3
                assert all(tag in ("ab", 12, None) for tag in value["tags"])
        assert num_complete >= 6, "hardly any walk comes to an end"

    # ------------------------------------------------------------ schemas

    def test_keywords_are_held_or_refused(self) -> None:
        for schema, right, wrong in HELD:
            grammar = self._grammar(GrammarSpec("json", json.dumps(schema)))
            if grammar is None:
                continue
            for text in right:
                assert self._fits(grammar, text), f"{schema} does not allow {text}"
            for text in wrong:
                assert not self._fits(grammar, text), f"{schema} allows {text}"

    def test_compact_json_has_one_form(self) -> None:
        schema = {"type": "array", "items": {"type": "object"}, "minItems": 2}
        spec = GrammarSpec("json", json.dumps(schema))
        one, free = "[{}, {}]", ("[ {}, {}]", "[{},\n{}]", "[{} , {}]")
        compact, loose = (self._grammar(spec, compact=compact) for compact in (True, False))
        if compact is None or loose is None:
            return
        assert self._fits(compact, one) and self._fits(loose, one)
        for text in free:
            assert not self._fits(compact, text), f"compact, and allows {text!r}"
        assert any(self._fits(loose, text) for text in free), "never any whitespace"

    def test_json_object_is_an_object(self) -> None:
        grammar = self._grammar(GrammarSpec("json_object"))
        if grammar is not None:
            for text, fits in (
                ("{}", True),
                ('{"a": [1, null]}', True),
                ("[]", False),
                ("1", False),
            ):
                assert self._fits(grammar, text) is fits, text

    # ------------------------------------------------------------ one grammar, many outputs

    def test_matchers_do_not_share_their_place(self) -> None:
        for spec, outputs in self._languages():
            grammar = self._grammar(spec)
            first, other = grammar.matcher(), grammar.matcher()
            before = _mask(other)
            assert first.accept(list(outputs[0].encode()))
            assert (_mask(other) == before).all(), f"{spec}: one goes on with the other"
            assert (_mask(grammar.matcher()) == before).all(), f"{spec}: not at the beginning"

    def test_grammars_do_not_share_anything(self) -> None:
        """Grammars compiled one after another by one backend stay unchanged."""
        languages = list(self._languages())
        grammars = [self._grammar(spec) for spec, _ in languages]
        for (spec, outputs), grammar in zip(languages, grammars, strict=True):
            texts = [output.encode() for output in outputs]
            _compare(_mask(grammar.matcher()), texts, b"", f"{spec}")

    def test_a_grammar_serves_threads_at_once(self) -> None:
        for spec, outputs in self._languages():
            grammar = self._grammar(spec)
            alone = [_trace(grammar, output) for output in outputs]
            with ThreadPoolExecutor(4) as pool:
                for mask in pool.map(
                    lambda output: _trace(grammar, output),  # noqa: B023
                    list(outputs) * 4,
                ):
                    assert any(np.array_equal(mask, other) for other in alone), f"{spec}"

    # ------------------------------------------------------------ what is optional

    def test_rolled_back_tokens_are_as_if_they_had_not_been(self) -> None:
        for spec, outputs in self._languages():
            tokens = list(max(outputs, key=len).encode())
            for count in range(1, len(tokens) + 1):
                matcher: Any = self._grammar(spec).matcher()
                if not hasattr(matcher, "rollback"):
                    return
                masks = [_mask(matcher)]
                for token in tokens:
                    assert matcher.accept([token])
                    masks.append(_mask(matcher))
                matcher.rollback(count)
                assert (_mask(matcher) == masks[-1 - count]).all(), f"{spec}: rollback({count})"
                assert matcher.accept(tokens[len(tokens) - count :])
                assert matcher.accept([vocabulary().eos_token_ids[0]])
                matcher.rollback(1)
                assert not matcher.is_terminated(), f"{spec}: the end token stays"
                assert (_mask(matcher) == masks[-1]).all(), f"{spec}: rollback of the end token"

    def test_forced_text_is_in_every_output(self) -> None:
        for spec, outputs in self._languages():
            texts = [output.encode() for output in outputs]
            for text in texts:
                matcher: Any = self._grammar(spec).matcher()
                if not hasattr(matcher, "forced_text"):
                    return
                for end in range(len(text) + 1):
                    text_so_far = text[:end] + matcher.forced_text().encode()
                    others = [other for other in texts if other.startswith(text[:end])]
                    assert all(other.startswith(text_so_far) for other in others), text_so_far
                    matcher.accept(list(text[end : end + 1]))

    def test_many_masks_at_once_are_those_of_each(self) -> None:
        matchers = self._matchers()
        fill = getattr(type(matchers[0]), "fill_bitmasks", None)
        if fill is None:
            return
        words = -(-SIZE // 32)
        for rows in (list(range(len(matchers))), [2 * n + 1 for n in range(len(matchers))][::-1]):
            bits = np.full((2 * len(matchers) + 1, words), -1, dtype=np.int32)
            assert list(fill(matchers, bits, rows)) == [None] * len(matchers)
            for matcher, row in zip(matchers, rows, strict=True):
                alone = np.empty(words, dtype=np.int32)
                matcher.fill_bitmask(alone)
                assert (bits[row] == alone).all(), f"row {row} is another's"
            rest = sorted(set(range(len(bits))) - set(rows))
            assert (bits[rest] == -1).all(), "rows that nobody asked for"

    def test_a_token_each_at_once_is_as_one_by_one(self) -> None:
        matchers, copies = self._matchers(), self._matchers()
        accept = getattr(type(matchers[0]), "accept_each", None)
        if accept is None:
            return
        tokens = [int(np.flatnonzero(_mask(matcher))[-1]) for matcher in matchers]
        tokens[1] = FIRST_EOS + 2  # A special token; no grammar here allows it.
        results = list(accept(matchers, tokens))
        assert len(results) == len(matchers)
        for number, (copy, token) in enumerate(zip(copies, tokens, strict=True)):
            assert (results[number] is True) is copy.accept([token]), f"matcher {number}"
            if results[number] is True and not copy.is_terminated():
                assert (_mask(matchers[number]) == _mask(copy)).all(), f"matcher {number}"

    # ------------------------------------------------------------ parts

    def _kind(self) -> Any:
        kind = self.backend_class()
        if (reason := kind.unavailable()) is not None:
            pytest.skip(reason)
        return kind

    def _backend(self, *, compact: bool = True) -> Any:
        return _made(self._kind(), compact)

    def _grammar(self, spec: GrammarSpec, *, compact: bool = True) -> Any:
        """Compile a grammar, cached; None if it is refused."""
        return _compiled(self._kind(), spec, compact)

    def _languages(self) -> Iterator[tuple[GrammarSpec, tuple[str, ...]]]:
        for spec, outputs in LANGUAGES:
            if self._grammar(spec) is not None:
                yield spec, outputs

    def _places(self) -> Iterator[tuple[GrammarSpec, list[bytes], bytes]]:
        """Yield a grammar, its outputs, and the beginning of one."""
        for spec, outputs in self._languages():
            texts = [output.encode() for output in outputs]
            for end in sorted({0, 1, len(texts[-1])}):
                yield spec, texts, texts[-1][:end]

    def _matchers(self) -> list[Any]:
        """Return matchers of one class at different positions of outputs."""
        matchers = []
        for spec, outputs in self._languages():
            for end in (0, 1):
                matcher = self._grammar(spec).matcher()
                assert matcher.accept(list(outputs[0].encode()[:end]))
                matchers.append(matcher)
        return [matcher for matcher in matchers if type(matcher) is type(matchers[0])]

    def _fits(self, grammar: Grammar, text: str) -> bool:
        """Return whether the whole output may be this text."""
        matcher = grammar.matcher()
        return all(matcher.accept([byte]) for byte in text.encode()) and bool(
            _mask(matcher)[FIRST_EOS]
        )


def _compare(bits: np.ndarray, texts: Sequence[bytes], prefix: bytes, where: str) -> None:
    """Compare a mask with all outputs of a language."""
    vocab = vocabulary()
    right = {
        token_id
        for token_id, written in enumerate(vocab.token_bytes)
        if written and any(text.startswith(prefix + written) for text in texts)
    }
    ends = set(vocab.eos_token_ids) if prefix in texts else set()
    mask_ids = set(np.flatnonzero(bits).tolist())
    wrong = [
        vocab.token_bytes[token_id] or f"id {token_id}"
        for token_id in sorted(mask_ids - right - ends)
    ]
    assert not wrong, f"{where}: allows {wrong[:5]}"
    assert ends <= mask_ids, f"{where}: does not allow every end token"
    expected = {text[len(prefix)] for text in texts if text.startswith(prefix) and text != prefix}
    first_bytes = {vocab.token_bytes[token_id][0] for token_id in mask_ids & right}
    missing = bytes(sorted(expected - first_bytes))
    assert first_bytes == expected, f"{where}: no token begins with {missing!r}"


@functools.lru_cache(maxsize=8)
def _made(kind: Any, compact: bool) -> Any:
    return kind(vocabulary(compact=compact))


@functools.lru_cache(maxsize=256)
def _compiled(kind: Any, spec: GrammarSpec, compact: bool) -> Any:
    if kind.refusal(spec) is not None:
        return None
    try:
        return _made(kind, compact).compile(spec)
    except ValueError:
        return None


def _mask(matcher: GrammarMatcher) -> np.ndarray:
    row = np.full(-(-SIZE // 32), -1, dtype=np.int32)
    matcher.fill_bitmask(row)
    return np.unpackbits(row.view(np.uint8), bitorder="little")[:SIZE]


def _trace(grammar: Grammar, output: str) -> np.ndarray:
    """Return every mask along an output, [steps + 1, SIZE]."""
    matcher = grammar.matcher()
    masks = [_mask(matcher)]
    for byte in output.encode():
        assert matcher.accept([byte])
        masks.append(_mask(matcher))
    return np.stack(masks)


def _walk(grammar: Grammar, draw: random.Random) -> str | None:
    """Return a random output, later steered to an end; None if it finds none."""
    matcher, written = grammar.matcher(), vocabulary().token_bytes
    output = b""
    for step in range(400):
        tokens = np.flatnonzero(_mask(matcher)).tolist()
        assert tokens, f"a dead end after {output!r}"
        if FIRST_EOS in tokens:
            assert matcher.accept([FIRST_EOS])
            return output.decode()
        closing = [token for token in tokens if written[token] in (b'"', b"]", b"}", b'"}', b'b"')]
        token = draw.choice(closing if closing and step > 8 else tokens)
        assert matcher.accept([token]), f"allowed, and not accepted: {written[token]!r}"
        output += written[token]
    return None

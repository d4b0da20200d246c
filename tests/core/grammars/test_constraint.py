"""One output on its way: what a backend or a reasoning parser may do to it, without a model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jackfield
from jackfield import SamplingParams, StructuredOutputsParams
from jackfield.core.grammars.constraint import Constraint
from jackfield.core.grammars.reasoning_gate import make_reasoning_gate
from jackfield.core.registry import load_plugins
from jackfield.core.step import CompiledGrammar, GrammarStart, ReasoningGate, SlotStart
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.plugins.reasoning.think_tags import Qwen3Reasoning

EMBEDDED = Path(jackfield.__file__).parent / "plugins" / "models" / "embedded"
END = 70
BYTES = {
    10: b"<tool_call>",
    11: b"\n{",
    1: b"a",
    2: b"b",
    3: b"<thi",
    4: b"nk>",
    5: b"</think>",
    6: b"<think>",
    END: b"",
}


class Letters:
    """`a`, then `b`, then the end: a grammar small enough to see through."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.place = 0

    def matcher(self) -> Any:
        if self.wrong == "matcher":
            raise OSError("no matcher today")
        return Letters(self.wrong)

    def accept(self, token_ids: Any) -> bool:
        if self.wrong == "accept":
            raise RuntimeError("past its limits")
        for token_id in token_ids:
            if token_id != (1, 2, END)[self.place]:
                return False
            self.place += 1
        return True

    def fill_bitmask(self, row: np.ndarray) -> None:
        if self.wrong == "fill":
            raise KeyError("lost")
        row[:] = 0
        token = (1, 2, END)[self.place]
        row[token >> 5] |= 1 << (token & 31)

    def is_terminated(self) -> bool:
        return self.place == 3


def constraint(
    grammar: Any = None,
    generated: tuple[int, ...] = (),
    gate: Any = None,
    barred: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> Constraint:
    start = GrammarStart((END,), gate)
    compiled = CompiledGrammar(
        start,
        grammar or Letters(),
        token_bytes=lambda token_id: BYTES.get(token_id, b"x"),
        encode=lambda text: [{"<tool_call>\n{": 1}.get(text, 2)],
        reasoning_parser=functools.partial(Qwen3Reasoning, thinking=True),
    )
    slot = SlotStart(
        slot=0, request_id="r", token_ids=(9, 9, *generated), num_prompt_tokens=2,
        num_computed_tokens=0, params=SamplingParams(**params), seed=0,
        stop_token_ids=(END, 33), bad_words_token_ids=barred, grammar=start,
    )  # fmt: skip
    return Constraint(slot, compiled, mask_timeout=5.0)


def allowed(row_constraint: Constraint) -> set[int]:
    row = np.zeros(3, dtype=np.int32)
    row_constraint.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


EVERYTHING = set(range(96))


def test_it_follows_the_grammar_to_its_end() -> None:
    row_constraint = constraint()
    for token in (1, 2, END):
        assert allowed(row_constraint) == {token}
        row_constraint.advance(token)
    assert row_constraint.ended and allowed(row_constraint) == EVERYTHING
    row_constraint.advance(7)  # a step that was in flight
    assert row_constraint.failure is None


def test_a_resumed_output_stands_where_it_was() -> None:
    assert allowed(constraint(generated=(1,))) == {2}
    assert allowed(constraint(generated=(1, 2), min_tokens=9)) == {END}, "nothing else is possible"


@pytest.mark.parametrize("wrong", ["matcher", "accept", "fill"])
def test_a_backend_that_raises_fails_its_request_alone(wrong: str) -> None:
    row_constraint = constraint(Letters(wrong))
    if wrong != "matcher":
        allowed(row_constraint)
    row_constraint.advance(1)
    assert row_constraint.failure is not None and row_constraint.failure.startswith(
        "structured_outputs: "
    )
    assert allowed(row_constraint) == EVERYTHING


def test_min_tokens_hold_an_end_back_until_there_are_that_many() -> None:
    class LettersOrEnd(Letters):
        """Any letter or the end, at every place."""

        def matcher(self) -> Any:
            return LettersOrEnd()

        def accept(self, token_ids: Any) -> bool:
            return True

        def fill_bitmask(self, row: np.ndarray) -> None:
            row[:] = 0
            for token in (1, 2, END):
                row[token >> 5] |= 1 << (token & 31)

    batched, single = (constraint(LettersOrEnd(), min_tokens=3) for _ in range(2))
    for count in range(5):
        expected = {1, 2} if count < 3 else {1, 2, END}
        assert allowed(single) == allowed(batched) == expected, f"after {count} tokens"
        single.advance(1)
        batched.record_accept(1, True)
    assert allowed(constraint(LettersOrEnd(), generated=(1, 2), min_tokens=3)) == {1, 2}
    assert allowed(constraint(LettersOrEnd(), generated=(1, 2, 1), min_tokens=3)) == {1, 2, END}


def test_a_failure_names_the_field_of_the_request() -> None:
    params = StructuredOutputsParams(regex="ab", field="response_format")
    for wrong in ("fill", "accept"):
        row_constraint = constraint(Letters(wrong), structured_outputs=params)
        allowed(row_constraint)
        row_constraint.advance(1)
        assert row_constraint.failed_param == "response_format"
        assert row_constraint.failure and row_constraint.failure.startswith("response_format: ")


def test_a_token_that_the_grammar_does_not_allow_is_a_failure() -> None:
    row_constraint = constraint()
    row_constraint.advance(2)
    assert row_constraint.failure is not None and "token 2" in row_constraint.failure


def test_a_row_without_a_token_has_ended() -> None:
    row_constraint = constraint()
    row_constraint.advance(-1)
    assert row_constraint.ended and row_constraint.failure is None


def test_inside_reasoning_everything_but_the_end_is_allowed() -> None:
    row_constraint = constraint(gate=ReasoningGate())
    for token in (2, 1, 3, 4, 40):
        assert allowed(row_constraint) == EVERYTHING - {END, 33}
        row_constraint.advance(token)
    row_constraint.advance(5)
    assert allowed(row_constraint) == {1}


def test_a_model_that_may_think_chooses_with_its_first_token() -> None:
    row_constraint = constraint(gate=ReasoningGate(opening_ids=(6,)))
    assert allowed(row_constraint) == {1, 6}
    row_constraint.advance(1)
    assert allowed(row_constraint) == {2}
    row_constraint = constraint(gate=ReasoningGate(opening_ids=(6,)))
    row_constraint.advance(6)
    assert allowed(row_constraint) == EVERYTHING - {END, 33}
    assert allowed(constraint(generated=(6, 1, 5), gate=ReasoningGate(opening_ids=(6,)))) == {1}


def test_a_call_that_ends_reasoning_belongs_to_the_content() -> None:
    row_constraint = constraint(gate=ReasoningGate())
    for token in (40, 10):
        row_constraint.advance(token)
        assert allowed(row_constraint) == EVERYTHING - {END, 33}
    row_constraint.advance(11)
    assert row_constraint.failure is None and allowed(row_constraint) == {2}, (
        "it counts as the grammar's first token"
    )


def test_a_call_that_the_grammar_forbids_cannot_end_reasoning() -> None:
    row_constraint = constraint(generated=(1,), gate=None)
    assert allowed(row_constraint) == {2}
    row_constraint = constraint(gate=ReasoningGate())
    BYTES[12] = b"\n<function="
    for token in (10, 12):
        row_constraint.advance(token)
    assert (
        row_constraint.failure is not None and "the reasoning ended with" in row_constraint.failure
    )


def test_a_model_that_thinks_when_it_likes_may_where_any_text_may_come() -> None:
    tokenizer = Tokenizer.load(str(EMBEDDED))
    parser = load_plugins()["reasoning_parser"].load("think_tags")
    assert make_reasoning_gate(parser, {}, tokenizer) is None
    gate = make_reasoning_gate(parser, {}, tokenizer, free=True)
    assert gate is not None and gate.opening_ids
    assert make_reasoning_gate(parser, {"enable_thinking": False}, tokenizer, free=True) is None


# ---------------------------------------------------------------- the request's own lists


class Any3(Letters):
    """Allows 1, 2 and 3 up to three times, and the end at any time but the first."""

    def accept(self, token_ids: Any) -> bool:
        self.place += len(token_ids)
        return True

    def fill_bitmask(self, row: np.ndarray) -> None:
        tokens = [*((1, 2, 3) if self.place < 3 else ()), *((END,) if self.place else ())]
        row[:] = 0
        for token in tokens:
            row[token >> 5] |= 1 << (token & 31)

    def matcher(self) -> Any:
        return Any3()

    def rollback(self, count: int) -> None:
        self.place -= count


def test_masks_respect_the_lists_and_end_where_nothing_else_is_left() -> None:
    row_constraint = constraint(Any3(), allowed_token_ids=(2, 3, 71))
    for _ in range(3):
        assert allowed(row_constraint) == {2, 3}
        row_constraint.advance(2)
    assert allowed(row_constraint) == {END} and row_constraint.failure is None
    assert allowed(constraint(Any3(), (3,), allowed_token_ids=(3, END))) == {3, END}
    assert allowed(constraint(Any3(), (3,), allowed_token_ids=(3, END), ignore_eos=True)) == {3}
    assert allowed(constraint(Any3(), (3,), allowed_token_ids=(71,))) == {END}
    one_left = constraint(Any3(), (3,), barred=((1,), (3, 2), (3, 3)))
    assert allowed(one_left) == {END}


def test_longer_bad_words_count_for_the_masks_of_drafts_too() -> None:
    row_constraint = constraint(Any3(), (1,), barred=((1, 2), (2, 1, 3), (3,)))
    assert allowed(row_constraint) == {1, END}
    assert row_constraint.mark()
    for token in (2, 1):
        row_constraint.advance(token)
    row_constraint.go_back()
    assert allowed(row_constraint) == {1, END}
    assert allowed(constraint(Any3(), (2, 1), barred=((1, 2), (2, 1, 3)))) == {1, END}


@pytest.mark.parametrize(
    ("params", "generated", "param", "words"),
    [
        ({"allowed_token_ids": (5,)}, (), "allowed_token_ids", "with guided_json, no token"),
        ({"allowed_token_ids": (1,)}, (1,), "allowed_token_ids", "after 1 tokens of output"),
        (
            {"allowed_token_ids": (1,), "bad_words": ("x",)}, (), "allowed_token_ids",
            "with bad_words and guided_json, no token is left",
        ),
        ({"bad_words": ("x",)}, (), "bad_words", "with guided_json, no token is left"),
    ],
)  # fmt: skip
def test_lists_that_leave_nothing_of_the_grammar_fail_the_request_by_their_fields(
    params: dict[str, Any], generated: tuple[int, ...], param: str, words: str
) -> None:
    structured = StructuredOutputsParams(json={}, field="guided_json")
    barred = ((1,),) if "bad_words" in params else ()
    row_constraint = constraint(
        None, generated, barred=barred, structured_outputs=structured, **params
    )
    assert allowed(row_constraint) == EVERYTHING
    assert row_constraint.failed_param == param
    assert row_constraint.failure is not None
    assert row_constraint.failure.startswith(f"{param}: ") and words in row_constraint.failure

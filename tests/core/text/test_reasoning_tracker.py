"""Which tokens are thought, and where the answer begins, against texts written by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jackfield.core.registry import load_plugins
from jackfield.core.text.parsing import hides_markers
from jackfield.core.text.reasoning import ReasoningTracker, lets_think
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.plugins.conformance.clock import processor_seconds

MARKS = ("<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes and marks are tokens, so that one can count by hand; the harmony marks are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for mark in MARKS:
        token = AddedToken(mark, normalized=False, special="|" in mark)
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    return Tokenizer(backend)


def parser(name: str, **options: Any) -> Any:
    return load_plugins()["reasoning_parser"].load(name)(**options)


CASES = {
    "model opens": ("qwen3", {}, "<think>\nabé</think>\n\n!", 4, 7),
    "prompt opened": ("deepseek_r1", {}, "ab\n\n</think>!", 2, 5),
    "nothing thought": ("qwen3", {}, "<think>\n\n</think>\n\n!", 0, 4),
    "not thinking": ("qwen3", {"thinking": False}, "four", 0, 0),
    "still thinking": ("qwen3", {}, "<think>abc", 3, None),
    "thinks when it likes, and does not": ("think_tags", {}, "<b", 0, 0),
    "thinks when it likes, and does": ("think_tags", {}, "<think>ab</think>c", 2, 4),
    "undecided": ("think_tags", {}, "\n", 0, None),
    "marks that are several tokens": ("mistral", {}, "[THINK]ab[/THINK]c", 2, 17),
    "harmony": (
        "gptoss",
        {},
        "<|channel|>analysis<|message|>abc<|end|><|start|>a<|channel|>final<|message|>d",
        3,
        23,
    ),
    "harmony's call": ("gptoss", {}, "<|channel|>analysis<|message|>abc<|end|><|start|>a"
                       "<|channel|>c to=f<|message|>{}<|call|>", 3, None),
}  # fmt: skip


@pytest.mark.parametrize(("name", "options", "text", "thought", "start"), CASES.values(), ids=CASES)
def test_thought_is_counted_in_tokens(
    tokenizer: Tokenizer, name: str, options: Any, text: str, thought: int, start: int | None
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    rng = random.Random(0)
    for most in (1, 3, len(ids)):
        tracker = ReasoningTracker(parser(name, **options), tokenizer)
        place = 0
        while place < len(ids):
            size = rng.randint(1, most)
            tracker.push(ids[place : place + size])
            place += size
        assert (tracker.num_reasoning_tokens, tracker.answer_start) == (thought, start)
        assert tracker.num_tokens == len(ids) and tracker.ended == (start is not None)


def test_it_ends_with_the_closing_mark_itself(tokenizer: Tokenizer) -> None:
    tracker = ReasoningTracker(parser("qwen3"), tokenizer)
    ids = tokenizer.encode("ab</think>", add_special_tokens=False)
    tracker.push(ids[:-1])
    assert not tracker.ended
    tracker.push(ids[-1:])
    assert tracker.ended and tracker.answer_start == 3


def test_a_hundred_thousand_tokens_take_linear_time(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("thinking\n" * 11_000, add_special_tokens=False)

    def track() -> None:
        tracker = ReasoningTracker(parser("qwen3"), tokenizer)
        for id in ids:
            tracker.push([id])
        assert 87_000 < tracker.num_reasoning_tokens <= len(ids)

    assert processor_seconds(track, 2) < 2


def test_the_switch_is_the_familys_own() -> None:
    plugins = load_plugins()["reasoning_parser"]
    qwen, granite = plugins.load("qwen3"), plugins.load("granite")
    assert lets_think(qwen, {}) and not lets_think(qwen, {"enable_thinking": False})
    assert lets_think(granite, {"thinking": True}) and not lets_think(granite, {})


def test_special_marks_must_be_shown(tokenizer: Tokenizer) -> None:
    plugins = load_plugins()["reasoning_parser"]
    assert hides_markers(tokenizer, [plugins.load("gptoss")])
    assert not hides_markers(tokenizer, [plugins.load("qwen3"), object])

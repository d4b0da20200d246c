"""One parser per completion: each character once, and reasoning tokens counted on the way."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jackfield.core.output_parsing.completion_parser import CompletionParser
from jackfield.core.output_parsing.output_parser import (
    OutputParser,
    ParsedMessage,
    fold,
    hides_markers,
)
from jackfield.core.output_parsing.output_text import OutputText
from jackfield.core.output_parsing.reasoning_parser import is_thinking
from jackfield.core.outputs import CompletionOutput
from jackfield.core.protocols.parsers import ParserEvent
from jackfield.core.registry import load_plugins
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.plugins.conformance.clock import growth

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


class Recorder:
    """Passes text on to a parser, and keeps it."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self.texts: list[str] = []

    @property
    def reasoning_ended(self) -> bool:
        return bool(self._parser.reasoning_ended)

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        self.texts.append(text)
        events: list[ParserEvent] = self._parser.feed(text, token_ids)
        return events

    def finish(self) -> list[ParserEvent]:
        events: list[ParserEvent] = self._parser.finish()
        return events


def parser(name: str, **options: Any) -> Recorder:
    return Recorder(load_plugins()["reasoning_parser"].load(name)(**options))


def outputs(
    tokenizer: Tokenizer, ids: Sequence[int], sizes: Callable[[], int], params: SamplingParams
) -> Iterator[CompletionOutput]:
    """The outputs of a completion in delta mode, of `sizes()` tokens each."""
    text, place, stopped = OutputText(tokenizer, [], params), 0, None
    while place < len(ids) and stopped is None:
        part = list(ids[place : place + sizes()])
        match = text.push(part, place + len(part))
        stopped = None if match is None else match.stop
        part = part if match is None else part[: match.token_index + 1]
        last = stopped is not None or place + len(part) == len(ids)
        if last:
            text.finish("stop")
        yield CompletionOutput(
            index=0,
            text=text.take_delta(),
            token_ids=part,
            token_ends=text.token_ends[place:],
            finish_reason="stop" if last else None,
        )
        place += len(part)


def parse(
    tokenizer: Tokenizer,
    reasoning: Recorder,
    ids: Sequence[int],
    sizes: Callable[[], int],
    params: SamplingParams | None = None,
) -> tuple[CompletionParser, ParsedMessage, str]:
    """→ (the parser, its message, the text of the outputs)"""
    completion = CompletionParser(OutputParser(reasoning, None))
    params = params or SamplingParams(skip_special_tokens=False)
    events: list[ParserEvent] = []
    text = ""
    for output in outputs(tokenizer, ids, sizes, params):
        text += output.text
        events += completion.feed(output)
    return completion, fold(events), text


CASES = {
    "model opens": ("qwen3", {}, "<think>\nabé</think>\n\n!", 4),
    "prompt opened": ("deepseek_r1", {}, "ab\n\n</think>!", 2),
    "nothing thought": ("qwen3", {}, "<think>\n\n</think>\n\n!", 0),
    "not thinking": ("qwen3", {"thinking": False}, "four", 0),
    "still thinking": ("qwen3", {}, "<think>abc", 3),
    "thinks when it likes, and does not": ("think_tags", {}, "<b", 0),
    "thinks when it likes, and does": ("think_tags", {}, "<think>ab</think>c", 2),
    "undecided": ("think_tags", {}, "\n", 0),
    "marks that are several tokens": ("mistral", {}, "[THINK]ab[/THINK]c", 2),
    "harmony": (
        "gptoss",
        {},
        "<|channel|>analysis<|message|>abc<|end|><|start|>a<|channel|>final<|message|>d",
        3,
    ),
    "harmony's call": ("gptoss", {}, "<|channel|>analysis<|message|>abc<|end|><|start|>a"
                       "<|channel|>c to=f<|message|>{}<|call|>", 3),
}  # fmt: skip


@pytest.mark.parametrize(("name", "options", "text", "count"), CASES.values(), ids=CASES)
def test_reasoning_tokens_are_counted_by_the_one_parser(
    tokenizer: Tokenizer, name: str, options: Any, text: str, count: int
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    rng = random.Random(0)
    messages = []
    for most in (1, 3, len(ids)):
        reasoning = parser(name, **options)
        sizes = functools.partial(rng.randint, 1 if most < len(ids) else most, most)
        completion, message, shown = parse(tokenizer, reasoning, ids, sizes)
        assert completion.num_reasoning_tokens == count
        assert completion.num_tokens == len(ids)
        assert "".join(reasoning.texts) == shown == text, "each character once, in order"
        messages.append(message)
    assert messages[0] == messages[1] == messages[2]


def test_after_the_reasoning_an_output_is_one_piece(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab</think>" + "c" * 500, add_special_tokens=False)
    reasoning = parser("qwen3")
    parse(tokenizer, reasoning, ids, lambda: len(ids))
    assert reasoning.texts == ["a", "b", "</think>", "c" * 500]


def test_text_that_may_be_a_stop_string_waits_and_counts_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>ab12c12345xyz", add_special_tokens=False)
    for size in (1, 4, len(ids)):
        reasoning = parser("qwen3")
        completion, message, shown = parse(
            tokenizer, reasoning, ids, lambda size=size: size, SamplingParams(stop=("12345",))
        )
        assert message.reasoning == "ab12c" and shown == "<think>ab12c"
        assert "".join(reasoning.texts) == shown
        assert completion.num_reasoning_tokens == 5, "those of the stop string have no text"


def test_tokens_of_one_character_end_where_it_does(tokenizer: Tokenizer) -> None:
    text = OutputText(tokenizer, [], SamplingParams())
    ids = tokenizer.encode("aé你b", add_special_tokens=False)
    text.push(ids[:-1], len(ids) - 1)
    text.push(ids[-1:], len(ids))
    text.push_stop_token()
    assert text.token_ends == [1, 1, 2, 2, 2, 3, 4, 4]


def test_an_unfinished_character_is_text_without_a_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>aé", add_special_tokens=False)[:-1]
    for size in (1, len(ids)):
        reasoning = parser("qwen3")
        completion, message, _ = parse(tokenizer, reasoning, ids, lambda size=size: size)
        assert message.reasoning == "a\ufffd" and completion.num_reasoning_tokens == 1


def test_a_hundred_thousand_tokens_take_linear_time(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("thinking\n" * 11_000, add_special_tokens=False)

    assert len(ids) > 87_000

    def run(count: int, size: int) -> None:
        completion, _, _ = parse(tokenizer, parser("qwen3"), ids[:count], lambda: size)
        assert 0.95 * count < completion.num_reasoning_tokens <= count

    tenth = len(ids) // 10
    for size in (1, len(ids)):
        small, large = functools.partial(run, tenth, size), functools.partial(run, len(ids), size)
        assert growth(small, large, bar=30) < 30


def test_the_switch_is_the_familys_own() -> None:
    plugins = load_plugins()["reasoning_parser"]
    qwen, granite = plugins.load("qwen3"), plugins.load("granite")
    assert is_thinking(qwen, {}) and not is_thinking(qwen, {"enable_thinking": False})
    assert is_thinking(granite, {"thinking": True}) and not is_thinking(granite, {})


def test_special_marks_must_be_shown(tokenizer: Tokenizer) -> None:
    plugins = load_plugins()["reasoning_parser"]
    assert hides_markers(tokenizer, [plugins.load("gptoss")])
    assert not hides_markers(tokenizer, [plugins.load("qwen3"), object])

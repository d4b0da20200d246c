"""Stop strings and the text that is safe to show, against a character-by-character search."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jackfield.core.output_parsing.output_text import OutputText, StopMatch
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.plugins.conformance.clock import growth

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["ab", "abc", "ba", "ca", "aab"]
_vocab = {token: rank for rank, token in enumerate([*ALPHABET, *WORDS])}
_backend = Backend(models.BPE(_vocab, []))
_backend.decoder = decoders.ByteLevel()
TOKENIZER = Tokenizer(_backend)


def ids(*tokens: str) -> list[int]:
    return [_vocab[token] for token in tokens]


def expected(
    tokens: list[str], stops: list[str], min_tokens: int, include: bool
) -> tuple[str, int | None]:
    """The plain rule: add characters one by one; the first stop string completed ends the text."""
    text = ""
    for index, token in enumerate(tokens):
        for char in token:
            text += char
            ending = [s for s in stops if text.endswith(s)]
            if ending and index + 1 > min_tokens:
                longest = max(ending, key=len)
                return (text if include else text[: -len(longest)]), index
    return text, None


PIECES = st.sampled_from(["a", "b", "c", *WORDS])
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(PIECES, max_size=25),
    stops=STOPS,
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
    size=st.integers(1, 5),
)
@example(tokens=["ab", "ca"], stops=["bca", "c"], min_tokens=0, include=False, size=1)
def test_stop_strings_follow_the_plain_rule(
    tokens: list[str], stops: list[str], min_tokens: int, include: bool, size: int
) -> None:
    params = SamplingParams(
        stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include
    )
    output = OutputText(TOKENIZER, [], params)
    want_text, want_index = expected(tokens, stops, min_tokens, include)
    shown = ""
    match = None
    for start in range(0, len(tokens), size):
        batch = tokens[start : start + size]
        match = output.push(ids(*batch), start + len(batch))
        shown += output.take_delta()
        assert output.text == shown
        assert want_text.startswith(shown), "text was shown that had to be taken back"
        if match:
            assert start + match.token_index == want_index
            break
    else:
        assert want_index is None
    output.finish("stop")
    output.finish("stop")
    shown += output.take_delta()
    assert shown == output.text == want_text


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    output = OutputText(TOKENIZER, [], SamplingParams(stop=("abcab",)))
    seen = []
    for number, token in enumerate(["c", "ab", "c", "b", "c"], 1):
        assert output.push(ids(token), number) is None
        seen.append(output.take_delta())
    assert seen == ["c", "", "", "abcb", "c"]


@pytest.mark.parametrize(
    "stops", [("ab",), ("ab", "ba"), ("aba", "b"), ("abab", "ab"), ("aab", "ba", "bb")]
)
def test_all_that_cannot_become_a_stop_string_is_shown_at_once(stops: tuple[str, ...]) -> None:
    """Before `min_tokens`, so that completed ones do not end the text. What is held is the longest
    end of the text that begins a stop string and is not all of it."""
    for letters in itertools.product("ab", repeat=6):
        output = OutputText(TOKENIZER, [], SamplingParams(stop=stops, min_tokens=100))
        text = ""
        for number, letter in enumerate(letters, 1):
            text += letter
            assert output.push(ids(letter), number) is None
            held = max(
                (
                    size
                    for size in range(1, number + 1)
                    if any(len(s) > size and s.startswith(text[-size:]) for s in stops)
                ),
                default=0,
            )
            assert output.text == text[: number - held], (stops, text)
        output.finish()


def test_a_stop_string_across_tokens_names_the_token_that_completed_it() -> None:
    output = OutputText(TOKENIZER, [], SamplingParams(stop=("bca",)))
    assert output.push(ids("a", "ab", "ca", "b"), 4) == StopMatch("bca", 2)
    assert output.text == "aa"
    assert output.push(ids("c"), 5) is None
    assert output.text == "aa"


def test_a_stop_string_within_min_tokens_does_not_count() -> None:
    params = SamplingParams(stop=("ab",), min_tokens=2)
    output = OutputText(TOKENIZER, [], params)
    assert output.push(ids("ab", "ab", "ab"), 3) == StopMatch("ab", 2)
    assert output.text == "abab"


def test_stop_strings_of_several_bytes_per_character() -> None:
    snow = "❄".encode()
    spelled = {TOKENIZER.token_bytes(i): i for i in range(256)}
    tokens = [spelled[bytes([b])] for b in b"a" + snow + b"b"]
    output = OutputText(TOKENIZER, [], SamplingParams(stop=("❄b",)))
    results = [output.push([t], n) for n, t in enumerate(tokens, 1)]
    assert results[:-1] == [None] * 4 and results[-1] == StopMatch("❄b", 0)
    assert output.text == "a"


@pytest.mark.parametrize("tokenizer", [None, TOKENIZER])
def test_without_detokenizing_there_is_no_text(tokenizer: Tokenizer | None) -> None:
    params = SamplingParams(detokenize=False) if tokenizer else SamplingParams(stop=("ab",))
    output = OutputText(tokenizer, [], params)
    assert output.push([1, 2, 3], 3) is None
    output.finish()
    assert output.text == output.take_delta() == ""


def test_many_long_stop_strings_over_a_long_output_take_linear_time() -> None:
    stops = tuple("a" * 1000 + "b" + chr(0x4E00 + k) for k in range(64))

    def stream(count: int) -> None:
        output = OutputText(TOKENIZER, [], SamplingParams(stop=stops))
        for number in range(1, count + 1):
            output.push(ids("a"), number)
            output.take_delta()
        output.finish()
        assert output.text == "a" * count

    assert growth(lambda: stream(5_000), lambda: stream(50_000), bar=30) < 30

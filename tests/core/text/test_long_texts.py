"""Texts of any length: encoded in bounded work, and refused for what they would become."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jackfield.core.errors import ContextLengthExceeded, EngineOverloaded, InvalidRequest
from jackfield.core.text.chat_template import ChatTemplate
from jackfield.core.text.text_threads import LONG_JOB, THREADS, TextThreads, rough_size
from jackfield.core.text.token_limit import PIECE, TokenLimit, encode_within
from jackfield.core.text.tokenizer import Tokenizer


def byte_level(longest: int = 1) -> Tokenizer:
    """A token a byte, and one of so many spaces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: rank for rank, token in enumerate(alphabet)}
    space, merges, width = "Ġ", [], 1
    while width < longest:
        merges.append((space * width, space * width))
        width *= 2
        vocab[space * width] = len(vocab)
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


class Counted:
    """An encoding of one token for four characters that adds up what it is given."""

    def __init__(self) -> None:
        self.characters = 0
        self.longest = 0

    def __call__(self, text: str) -> list[int]:
        self.characters += len(text)
        self.longest = max(self.longest, len(text))
        return [ord(text[i]) for i in range(0, len(text), 4)]


@pytest.mark.parametrize("size", [10_000_000, 40_000_000])
def test_a_text_that_is_too_long_is_found_out_after_a_few_pieces(size: int) -> None:
    encode = Counted()
    limit = TokenLimit(tokens=20_000, context=20_001)
    with pytest.raises(ContextLengthExceeded) as caught:
        encode_within("x" * size, limit, encode, lambda: 1 << 20)
    assert caught.value.param == "prompt"
    assert encode.characters < 3 * 4 * 20_000 and encode.longest <= PIECE


def test_a_text_longer_than_any_tokens_could_make_it_is_not_encoded_at_all() -> None:
    encode = Counted()
    limit = TokenLimit(tokens=1000, context=1001, param="messages")
    with pytest.raises(ContextLengthExceeded) as caught:
        encode_within("x" * 200_000, limit, encode, lambda: 100)
    assert encode.characters == 0 and caught.value.param == "messages"


def test_more_than_is_tokenized_for_its_own_sake_is_refused_without_naming_the_context() -> None:
    limit = TokenLimit(tokens=30_000, context=1000)
    with pytest.raises(InvalidRequest, match="more than 30000 tokens") as caught:
        encode_within("x" * 1_000_000, limit, Counted(), lambda: 1 << 20)
    assert not isinstance(caught.value, ContextLengthExceeded)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tokens", [10, 20_000, 40_000])
def test_a_text_that_is_cut_is_encoded_as_far_as_it_is_kept(side: str, tokens: int) -> None:
    text = "".join(chr(97 + i % 23) for i in range(4 * 250_000))
    whole = Counted()(text)
    encode = Counted()
    limit = TokenLimit(tokens=tokens, context=50_000, cut=side)  # type: ignore[arg-type]
    ids = encode_within(text, limit, encode, lambda: 1)
    truncated = ids[:tokens] if side == "right" else ids[-tokens:]
    assert truncated == (whole[:tokens] if side == "right" else whole[-tokens:])
    assert encode.longest <= 4 * max(PIECE, 4 * tokens)


def test_no_text_that_fits_is_refused() -> None:
    tokenizer = byte_level(128)
    assert tokenizer.characters_per_token == 128
    limit = TokenLimit(tokens=5000, context=5001)
    text = " " * (128 * 5000)
    assert len(tokenizer.encode(text, limit=limit)) == 5000
    with pytest.raises(ContextLengthExceeded):
        tokenizer.encode(text + " ", limit=limit)


def test_tokenizers_that_drop_characters_are_given_more_of_them() -> None:
    words = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))  # type: ignore[arg-type]
    words.normalizer = normalizers.BertNormalizer()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    assert Tokenizer(words).characters_per_token == 256
    shrinks = byte_level()
    shrinks.backend.normalizer = normalizers.Replace("  ", " ")
    assert shrinks.characters_per_token == 256
    keeps = byte_level()
    keeps.backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(" ", "▁")]
    )
    assert keeps.characters_per_token == 1


def test_messages_that_cannot_fit_are_refused_before_they_are_rendered() -> None:
    template = ChatTemplate("{% for m in messages %}{{ boom(m) }}{% endfor %}", byte_level())
    limit = TokenLimit(tokens=1000, context=1001, param="messages")
    for messages in (
        [{"role": "user", "content": "x" * 100_000}],
        [{"role": "assistant", "content": "x" * 100} for _ in range(1000)],
        [{"role": "user", "content": [{"type": "text", "text": "x" * 100_000}]}],
    ):
        with pytest.raises(ContextLengthExceeded):
            template.render_tokens(messages, limit=limit)
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 100_000}}]
    with pytest.raises(ContextLengthExceeded):
        template.render_tokens([{"role": "user", "content": "x"}], tools=tools, limit=limit)


def test_a_rendered_text_that_grew_is_refused_as_well() -> None:
    template = ChatTemplate("{{ messages[0].content * 50 }}", byte_level())
    limit = TokenLimit(tokens=1000, context=1001, param="messages")
    with pytest.raises(ContextLengthExceeded):
        template.render_tokens([{"role": "user", "content": "x" * 5000}], limit=limit)


# ---------------------------------------------------------------- threads


def held(gate: threading.Event, begun: list[int], number: int) -> Callable[[], int]:
    def work() -> int:
        begun.append(number)
        assert gate.wait(300)
        return number

    return work


async def test_texts_of_an_ordinary_length_do_not_wait_behind_long_ones() -> None:
    threads, gate, begun = TextThreads(), threading.Event(), []
    try:
        long = [
            asyncio.create_task(threads.run(LONG_JOB, held(gate, begun, number)))
            for number in range(5)
        ]
        assert await threads.run(LONG_JOB - 1, lambda: "done") == "done"
        assert len(begun) <= 1, "more than one long text at a time"
        gate.set()
        assert await asyncio.gather(*long) == [0, 1, 2, 3, 4]
    finally:
        gate.set()
        threads.close()


async def test_what_waits_is_bounded_and_the_rest_is_refused() -> None:
    threads, gate, begun = TextThreads(1000), threading.Event(), []
    try:
        first = asyncio.create_task(threads.run(5000, held(gate, begun, 0)))  # Alone, any size.
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloaded):
            await threads.run(1, lambda: None)
        gate.set()
        assert await first == 0
        waiting = [asyncio.create_task(threads.run(400, lambda: 1)) for _ in range(2)]
        assert await asyncio.gather(*waiting) == [1, 1]
        assert threads.waiting_characters == 0
    finally:
        gate.set()
        threads.close()


async def test_a_caller_that_leaves_before_its_text_begins_gives_its_place_back() -> None:
    threads, gate, begun = TextThreads(1000), threading.Event(), []
    try:
        running = [
            asyncio.create_task(threads.run(10, held(gate, begun, number)))
            for number in range(THREADS)
        ]
        gone = asyncio.create_task(threads.run(900, held(gate, begun, -1)))
        await asyncio.sleep(0)
        assert threads.waiting_characters == 900 + 10 * THREADS
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert threads.waiting_characters == 10 * THREADS
        gate.set()
        await asyncio.gather(*running)
        assert -1 not in begun and threads.waiting_characters == 0
    finally:
        gate.set()
        threads.close()


async def test_what_the_work_raises_is_raised_and_leaves_nothing() -> None:
    threads = TextThreads()
    with pytest.raises(ZeroDivisionError):
        await threads.run(LONG_JOB * 8, lambda: 1 // 0)
    assert threads.waiting_characters == 0
    threads.close()
    with pytest.raises(RuntimeError):
        await threads.run(1, lambda: None)
    assert threads.waiting_characters == 0


def test_sizes_are_found_without_looking_at_everything() -> None:
    assert rough_size([{"role": "user", "content": "x" * 10}], None) == 14
    assert rough_size("abc", [["de"], {"a": 5}]) == 5
    assert rough_size([{"content": "x"}] * 1_000_000) == LONG_JOB

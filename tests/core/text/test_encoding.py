"""Long texts: the same tokens as short ones' way gives, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ContextLengthExceeded
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.text.token_limit import LONG_TEXT, encode_text
from jackfield.core.text.tokenizer import Tokenizer

WORDS = "Hello world, naïve café 你好 <|im_end|> 🙂. "
LONG = WORDS * 12_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(resolve_model_config(EngineConfig()).path))


@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_has_the_tokens_that_the_library_gives_it(
    tokenizer: Tokenizer, special: bool
) -> None:
    text = WORDS * (LONG_TEXT // len(WORDS) + 1)
    assert len(text) >= LONG_TEXT
    for pair in (None, text[::-1]):
        result = encode_text(tokenizer.backend, text, pair, add_special_tokens=special)
        known = tokenizer.backend.encode(text, pair, add_special_tokens=special)
        assert (result.ids, result.type_ids) == (known.ids, known.type_ids)


async def shares(work: Awaitable[Any]) -> tuple[float, float]:
    """(seconds that `work` took, the longest of them without a turn of the loop)"""
    task = asyncio.ensure_future(work)
    start = last = time.perf_counter()
    longest = 0.0
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await asyncio.gather(task, return_exceptions=True)
    return last - start, longest


@pytest.mark.parametrize("allow_special", [True, False])
def test_the_loop_has_its_turns_while_a_thread_encodes_a_long_text(
    tokenizer: Tokenizer, allow_special: bool
) -> None:
    tokenizer.encode("warm", allow_special=allow_special)
    work = functools.partial(tokenizer.encode, LONG, allow_special=allow_special)
    for _ in range(20):  # Another process may have had a turn of the loop.
        total, longest = asyncio.run(shares(asyncio.to_thread(work)))
        if longest < total / 2:
            return
    raise AssertionError(f"{longest:.3f} of {total:.3f} s without a turn")


def test_the_engine_takes_long_prompts_on_other_threads_and_refuses_them_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, bool]] = []
    """Characters of each text that was encoded, and whether the event loop's thread did it."""

    def noted(backend: Any, text: str, *rest: Any, **options: Any) -> Any:
        seen.append((len(text), threading.current_thread() is threading.main_thread()))
        return encode_text(backend, text, *rest, **options)

    monkeypatch.setattr("jackfield.core.text.tokenizer.encode_text", noted)
    fits = WORDS * 300
    chat = [{"role": "user", "content": LONG}]
    cut = SamplingParams(truncate_prompt_tokens=20, max_tokens=1)

    async def check() -> None:
        async with AsyncEngine(EngineConfig()) as engine:
            for stream in (engine.generate(LONG), engine.chat(chat)):
                with pytest.raises(ContextLengthExceeded):
                    await anext(aiter(stream))
            assert sum(size for size, _ in seen) < len(LONG) / 2
            output = await anext(aiter(engine.generate(LONG, cut)))
            whole = engine.tokenizer.encode(LONG)  # type: ignore[union-attr]
            assert output.prompt_token_ids == whole[-20:]
            seen.pop()
            assert await engine.tokenize_texts([fits]) == [engine.tokenizer.encode(fits)]  # type: ignore[union-attr]
            seen.pop()
            assert not any(on_loop for _, on_loop in seen)

    asyncio.run(check())

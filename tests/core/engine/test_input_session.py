"""Sessions: inputs appended to one prompt say what one request with all of it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from jackfield import AsyncEngine, EngineConfig, OutputKind, RequestOutput, SamplingParams
from jackfield.core.engine.input_session import StreamingInput
from jackfield.core.errors import InvalidRequest

BLOCK = 16
CONFIG = EngineConfig(device="cpu", dtype="float32", block_size=BLOCK, max_model_len=256)
PARTS = (list(range(20, 60)), list(range(70, 90)), list(range(100, 105)))


def greedy(max_tokens: int, kind: OutputKind = OutputKind.CUMULATIVE) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind)


async def inputs(*parts: StreamingInput) -> AsyncIterator[StreamingInput]:
    for part in parts:
        yield part


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    *_, output = [output async for output in outputs]
    return output


@pytest.mark.parametrize("kind", OutputKind)
async def test_each_input_follows_all_that_came_before(kind: OutputKind) -> None:
    """Also what was written, but for its last token; and what was read is not read again."""
    async with AsyncEngine(CONFIG) as engine:
        appended = [StreamingInput(part) for part in PARTS]
        appended[1] = StreamingInput(PARTS[1], greedy(1, kind))
        ends, texts = [], [""]
        async for output in engine.session(inputs(*appended), greedy(6, kind), request_id="one"):
            assert output.request_id == "one"
            texts[-1] += output.outputs[0].text
            if output.finished:
                ends.append(output)
                texts.append("")
        prompt: list[int] = []
        for number, (part, output) in enumerate(zip(PARTS, ends, strict=True)):
            known = len(prompt)
            prompt += part
            assert output.prompt_token_ids == prompt
            alone = await last(
                engine.generate({"prompt_token_ids": prompt}, greedy((6, 1, 6)[number]))
            )
            if kind is OutputKind.DELTA:
                assert texts[number] == alone.outputs[0].text
            else:
                assert output.outputs[0].token_ids == alone.outputs[0].token_ids
            assert output.num_cached_tokens >= known // BLOCK * BLOCK
            prompt += alone.outputs[0].token_ids[:-1]


async def test_texts_are_appended_without_new_beginnings() -> None:
    async with AsyncEngine(CONFIG) as engine:
        texts = ("The quick brown", " fox jumps")
        output = await last(engine.session(inputs(*map(StreamingInput, texts)), greedy(1)))
        [first] = await engine.tokenize_texts([texts[0]])
        [second] = await engine.tokenize_texts([texts[1]], add_special_tokens=False)
        assert output.prompt_token_ids == first + second


async def test_leaving_a_session_ends_its_request() -> None:
    async with AsyncEngine(CONFIG) as engine:
        outputs = engine.session(inputs(StreamingInput(PARTS[0])), greedy(200, OutputKind.DELTA))
        async for _ in outputs:
            break
        await outputs.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(300):
            while engine.stats().num_requests_running:
                await asyncio.sleep(0)


async def test_a_wrong_input_ends_the_session_alone() -> None:
    async with AsyncEngine(CONFIG) as engine:
        for wrong, field in (
            (StreamingInput([5] * 300), "prompt"),
            (StreamingInput([5], SamplingParams(n=2)), "n"),
            (StreamingInput({"prompt_embeds": 3}), "prompt"),  # type: ignore[arg-type]
        ):
            outputs = engine.session(inputs(StreamingInput(PARTS[2]), wrong), greedy(2))
            with pytest.raises(InvalidRequest) as error:
                await last(outputs)
            assert error.value.param == field
        assert await last(engine.generate("Hello", greedy(2)))

"""Structured outputs in the engine: beside plain rows, preempted, replayed, at their ends."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from test_graphs import Plugin, StaticExecutor  # type: ignore[import-not-found]

from jackfield import AsyncEngine, EngineConfig, SamplingParams, StructuredOutputsParams
from jackfield.core.errors import InvalidRequest
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.step import PrepareAhead
from jackfield.core.worker.graphs.decode_graphs import DecodeKey
from jackfield.core.worker.graphs.endings import Ending

from helpers import at_once

NUMBERS = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "values": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999},
                   "minItems": 2, "maxItems": 12},
    },
    "required": ["title", "values"],
    "additionalProperties": False,
}  # fmt: skip
LINES = StructuredOutputsParams(regex=r"([a-z]{2,9} ){20,30}\.")


def config(**options: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "dtype": "float32",
            "device": "cpu",
            "max_model_len": 512,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 400,
            "attention_backend": "torch",
            "structured_outputs_config": {"disable_any_whitespace": True},
            **options,
        }
    )


async def final(stream: Any) -> Any:
    last = [output async for output in stream][-1]
    assert last.error is None, last.error
    return last


async def ask(engine: AsyncEngine, params: SamplingParams, prompt: Any = "Write") -> Any:
    return await final(engine.generate(prompt, params))


def structured(seed: int = 0, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "structured_outputs": StructuredOutputsParams(json=NUMBERS),
            "max_tokens": 200,
            "seed": seed,
            **options,
        }
    )


def check(completion: Any) -> None:
    assert completion.finish_reason == "stop", completion
    value = json.loads(completion.text)
    assert list(value) == ["title", "values"] and len(value["title"]) <= 20
    assert 2 <= len(value["values"]) <= 12
    assert all(type(v) is int and 0 <= v <= 999 for v in value["values"])


MIXED: list[SamplingParams] = [
    SamplingParams(max_tokens=40, seed=1, ignore_eos=True),
    structured(2),
    SamplingParams(max_tokens=40, temperature=0.0, logprobs=2, ignore_eos=True),
    structured(3, temperature=1.5, top_p=0.9),
    structured(4, temperature=0.0),
    SamplingParams(max_tokens=40, seed=5, top_k=20, repetition_penalty=1.2, ignore_eos=True),
    structured(6, logprobs=1, presence_penalty=0.5),
    structured(7, n=2),
]


def tokens(output: Any) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


async def test_rows_of_a_mixed_batch_get_what_they_get_alone() -> None:
    async with AsyncEngine(config()) as engine:
        alone = [await ask(engine, params) for params in MIXED]
        together = await at_once(engine, *(ask(engine, params) for params in MIXED))
    assert [tokens(output) for output in together] == [tokens(output) for output in alone]
    for params, output in zip(MIXED, together, strict=True):
        if params.structured_outputs is not None:
            for completion in output.outputs:
                check(completion)


async def test_recorded_steps_give_what_launched_ones_give() -> None:
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("test", "0", "static"))
    StaticExecutor.recorders.clear()
    static = config(executor="static", attention_backend="static")
    async with AsyncEngine(static, plugins=plugins) as engine:
        replayed = await at_once(engine, *(ask(engine, params) for params in MIXED))
        assert StaticExecutor.recorders[0].replays > 50
        executor: Any = engine.core.executor
        graphs = executor._worker.runner.decode.graphs
        while await executor.ask(PrepareAhead()):
            pass
        assert not graphs.missing() and DecodeKey(8, Ending.LOGITS) in graphs._replays
    async with AsyncEngine(config()) as engine:
        launched = await at_once(engine, *(ask(engine, params) for params in MIXED))
    assert [tokens(output) for output in replayed] == [tokens(output) for output in launched]


async def test_preemption_and_prefix_hits_do_not_change_a_structured_output() -> None:
    prompt = "The history of numbers, told at length. " * 6
    sampling = [
        SamplingParams(structured_outputs=LINES, max_tokens=70, seed=seed) for seed in range(4)
    ]
    async with AsyncEngine(config()) as engine:
        alone = [await ask(engine, sampling[0], prompt)]
        alone += await asyncio.gather(*(ask(engine, params, prompt) for params in sampling[1:]))
        assert engine.stats().prefix_cache_hits > 0
    async with AsyncEngine(
        config(num_gpu_blocks_override=40, enable_prefix_caching=False)
    ) as engine:
        crowded = await at_once(engine, *(ask(engine, params, prompt) for params in sampling))
        assert engine.stats().num_preemptions > 0
    assert [tokens(output) for output in crowded] == [tokens(output) for output in alone]
    for output in crowded:
        text = output.outputs[0].text
        assert output.outputs[0].finish_reason == "length" or re.fullmatch(
            r"([a-z]{2,9} ){20,30}\.", text
        )


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
async def test_a_complete_grammar_ends_the_output_whatever_else_was_asked(backend: str) -> None:
    choice = StructuredOutputsParams(choice=["yes", "no"])
    options = {"structured_outputs_config": {"backend": backend}}
    async with AsyncEngine(config(**options)) as engine:
        for more in ({}, {"ignore_eos": True}, {"min_tokens": 30}, {"logit_bias": {1529: -100}}):
            params = SamplingParams(structured_outputs=choice, max_tokens=40, seed=1, **more)
            (completion,) = (await ask(engine, params)).outputs
            assert completion.text in ("yes", "no")
            assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


async def test_min_tokens_and_ignore_eos_hold_an_end_back_while_there_is_a_choice() -> None:
    letters = StructuredOutputsParams(regex="[ab]+")
    async with AsyncEngine(config()) as engine:
        params = SamplingParams(structured_outputs=letters, max_tokens=60, seed=1, min_tokens=50)
        (completion,) = (await ask(engine, params)).outputs
        assert len(completion.token_ids) >= 50 and set(completion.text) <= {"a", "b"}
        params = SamplingParams(structured_outputs=letters, max_tokens=60, seed=1, ignore_eos=True)
        (completion,) = (await ask(engine, params)).outputs
        assert len(completion.token_ids) == 60 and completion.finish_reason == "length"


async def test_a_stop_string_ends_a_structured_output_early() -> None:
    async with AsyncEngine(config()) as engine:
        params = structured(1, stop=("values",))
        (completion,) = (await ask(engine, params)).outputs
        assert completion.finish_reason == "stop" and completion.stop_reason == "values"
        assert completion.text.endswith(', "')


async def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    choice = StructuredOutputsParams(choice=["qq"])
    async with AsyncEngine(config()) as engine:
        forced = SamplingParams(structured_outputs=choice, logprobs=3, max_tokens=8, temperature=0)
        plain = SamplingParams(logprobs=3, max_tokens=1, temperature=0)
        first = (await ask(engine, forced)).outputs[0]
        other = (await ask(engine, plain)).outputs[0]
    # The most likely tokens are those of the model, though the grammar allowed none of them.
    best = other.token_ids[0]
    assert first.token_ids[0] != best
    assert first.logprobs[0][best].logprob == pytest.approx(other.logprobs[0][best].logprob)
    assert first.logprobs[0][first.token_ids[0]].rank > 1


async def test_an_aborted_structured_request_leaves_nothing_behind() -> None:
    async with AsyncEngine(config()) as engine:
        stream = engine.generate("Write", structured(1, ignore_eos=True))
        await anext(stream)
        await stream.aclose()
        check((await ask(engine, structured(2))).outputs[0])
        assert engine.stats().kv_blocks_used == 0
        masks = engine.core.executor._worker.runner.masks  # type: ignore[attr-defined]
        await ask(engine, SamplingParams(max_tokens=2))
        assert not masks._constraints and not masks._unseen


async def test_the_grammar_begins_where_the_thought_ends() -> None:
    """Asked to think, the model may open a thought; whatever it thinks, the answer is a number."""
    number = StructuredOutputsParams(regex="[0-9]{1,3}")
    messages = [{"role": "user", "content": "Add 3 and 4."}]
    async with AsyncEngine(config(reasoning_parser="think_tags")) as engine:
        opened = engine.tokenizer.backend.token_to_id("<think>")  # type: ignore[union-attr]
        closed = engine.tokenizer.backend.token_to_id("</think>")  # type: ignore[union-attr]
        seen = set()
        for seed in range(6):
            params = SamplingParams(
                structured_outputs=number,
                max_tokens=60,
                seed=seed,
                logit_bias={opened: 40.0 if seed % 2 else -50.0, closed: 45.0},
            )
            thinking = {"enable_thinking": True}
            stream = engine.chat(messages, params, chat_template_kwargs=thinking)
            (completion,) = (await final(stream)).outputs
            assert completion.finish_reason == "stop", completion
            match = re.fullmatch(r"(?s)(<think>.*?</think>)?([0-9]{1,3})", completion.text)
            assert match is not None, completion.text
            seen.add(match[1] is not None)
        assert seen == {True, False}
        unasked = SamplingParams(
            structured_outputs=number, max_tokens=60, seed=1, logit_bias={opened: 40.0}
        )
        (completion,) = (await final(engine.chat(messages, unasked))).outputs
        assert re.fullmatch("[0-9]{1,3}", completion.text), "nobody asked it to think"


async def test_requests_that_reason_at_the_same_time_log_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their masks are complete without the backend, in a step that has no others."""
    async with AsyncEngine(config(reasoning_parser="think_tags")) as engine:
        opened = engine.tokenizer.backend.token_to_id("<think>")  # type: ignore[union-attr]
        params = SamplingParams(
            structured_outputs=StructuredOutputsParams(regex="[0-9]{1,3}"),
            max_tokens=20,
            seed=1,
            n=3,
            logit_bias={opened: 60.0},
        )
        messages = [{"role": "user", "content": "Add 3 and 4."}]
        output = await final(
            engine.chat(messages, params, chat_template_kwargs={"enable_thinking": True})
        )
        assert all(one.text.startswith("<think>") for one in output.outputs), output.outputs
    assert not caplog.records


async def test_a_refused_grammar_costs_its_request_alone() -> None:
    async with AsyncEngine(config()) as engine:
        running = asyncio.create_task(ask(engine, structured(1)))
        for wrong, field in (
            ({"regex": "(a"}, "structured_outputs.regex"),
            ({"json": {"type": "heap"}}, "structured_outputs.json"),
            ({"json": {"$ref": "#"}}, "structured_outputs.json"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await ask(
                    engine, SamplingParams(structured_outputs=StructuredOutputsParams(**wrong))
                )
            assert caught.value.param == field
        check((await running).outputs[0])


async def test_an_engine_without_a_tokenizer_says_so() -> None:
    async with AsyncEngine(config(skip_tokenizer_init=True)) as engine:
        with pytest.raises(InvalidRequest, match="tokenizer"):
            await ask(engine, structured(1), [5, 6])

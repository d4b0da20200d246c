"""The embedded model and what it was made from."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import jackfield
from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.protocols.parsers import ToolCallArguments, ToolCallStart
from jackfield.plugins.tools.hermes import HermesToolParser

from helpers import at_once

EXAMPLE = Path(jackfield.__file__).resolve().parent / "examples" / "tiny_model"
KINDS = {"talk", "facts", "arithmetic", "json", "copy", "tools", "reasoning"}


@pytest.fixture(scope="module")
def made() -> Any:
    """The example's modules, which import each other by plain names."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import evaluate
        import generator

        yield generator, evaluate
    finally:
        sys.path.remove(str(EXAMPLE))


def test_the_generator_gives_the_same_for_a_seed(made: Any) -> None:
    generator, _ = made

    def some(seed: int, split: str) -> list[Any]:
        return list(itertools.islice(generator.examples(seed, split), 200))

    assert some(5, "train") == some(5, "train")
    assert some(5, "train") != some(6, "train")
    assert {example.kind for example in some(5, "train")} == KINDS == set(generator.KINDS)


def test_no_held_out_prompt_is_learned(made: Any) -> None:
    generator, evaluate = made
    learned = {evaluate.prompt(e) for e in itertools.islice(generator.examples(1, "train"), 3000)}
    for kind in ("arithmetic", "json", "copy", "tools", "reasoning"):
        held_out = list(itertools.islice(generator.examples(2, "held-out", kind), 100))
        assert not any(evaluate.prompt(example) in learned for example in held_out), kind


def test_every_tool_call_that_is_taught_can_be_parsed(made: Any) -> None:
    generator, evaluate = made
    calls = 0
    for example in itertools.islice(generator.examples(3, "train", "tools"), 300):
        text = "".join(part for part, learned in evaluate.segments(example) if learned)
        parser = HermesToolParser()
        events = [*parser.feed(text), *parser.finish()]
        names = [event.name for event in events if isinstance(event, ToolCallStart)]
        assert len(names) == text.count("<tool_call>")
        parts = [event.fragment for event in events if isinstance(event, ToolCallArguments)]
        if names:
            assert isinstance(json.loads("".join(parts)), dict)
            calls += 1
    assert calls > 100


def test_the_checkpoint_is_light_and_its_scores_are_those_recorded() -> None:
    assert (EMBEDDED_MODEL / "model.safetensors").stat().st_size <= 6_000_000
    scores = json.loads((EXAMPLE / "scores.json").read_text())
    assert set(scores) == KINDS | {"count"} and scores["count"] >= 100
    assert all(0.9 < scores[kind] <= 1 for kind in KINDS)


async def test_its_draft_head_saves_steps(made: Any) -> None:
    """Of held-out prompts, greedy and sampled; and the tokens are those without it."""
    generator, evaluate = made
    asked = [
        (evaluate.prompt(example), SamplingParams(temperature=t, seed=5, max_tokens=60))
        for kind, t in zip(sorted(KINDS), itertools.cycle((0.0, 0.6)))
        for example in itertools.islice(generator.examples(21, "held-out", kind), 1)
    ]

    async def serve(**options: Any) -> tuple[list[list[int]], Any]:
        config = EngineConfig(
            device="cpu", dtype="float32", max_model_len=512, max_num_seqs=4,
            num_gpu_blocks_override=200, **options,
        )  # fmt: skip
        async with AsyncEngine(config) as engine:

            async def one(prompt: str, params: SamplingParams) -> list[int]:
                async for out in engine.generate(prompt, params):
                    last = out
                assert last.error is None, last.error
                return list(last.outputs[0].token_ids)

            # One after the other: acceptance is that of single streams.
            return [await one(*each) for each in asked], engine.stats()

    plain, before = await serve()
    drafted, after = await serve(speculative_config={"method": "eagle3"})
    assert drafted == plain
    assert after.steps < 0.7 * before.steps
    assert after.spec_decode_num_accepted_tokens > 0.4 * after.spec_decode_num_draft_tokens


async def test_the_training_of_its_draft_head_writes_what_the_engine_reads(
    made: Any, tmp_path: Path
) -> None:
    """A step of it: tensors and config.json are those of the head in the box."""
    import train_draft

    args = argparse.Namespace(
        out=tmp_path, start=None, examples=30, batch_tokens=200, steps=1, max_seconds=1e9,
        passes=2, rate=1e-3,
    )  # fmt: skip
    train_draft.train(args)
    own, box = (
        safe_open(folder / "model.safetensors", "pt")
        for folder in (tmp_path, EMBEDDED_MODEL / "eagle3")
    )
    shapes = [{n: f.get_slice(n).get_shape() for n in f.keys()} for f in (own, box)]
    assert shapes[0] == shapes[1]
    written, kept = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path, EMBEDDED_MODEL / "eagle3")
    )
    assert written == kept


async def test_it_answers_held_out_prompts_of_each_kind(made: Any) -> None:
    """Through this engine, a few of each: nine in ten at least are right."""
    generator, evaluate = made
    config = EngineConfig(device="cpu", attention_backend="torch", max_num_seqs=16)
    right: dict[str, int] = {}
    count = 4
    async with AsyncEngine(config) as engine:

        async def answer(example: Any) -> bool:
            prompt = engine.tokenizer.encode(evaluate.prompt(example), add_special_tokens=False)
            params = SamplingParams(temperature=0.0, max_tokens=200, skip_special_tokens=False)
            async for out in engine.generate(prompt, params):
                last = out
            return evaluate.correct(example, last.outputs[0].text)

        for kind in sorted(KINDS):
            examples = itertools.islice(generator.examples(77, "held-out", kind), count)
            right[kind] = sum(await asyncio.gather(*map(answer, examples)))
    assert sum(right.values()) >= 0.9 * count * len(KINDS), right
    assert min(right.values()) >= count - 2, right


async def test_it_says_the_same_from_a_cache_of_8_bits(made: Any) -> None:
    generator, evaluate = made
    answers = []
    for stored in ("auto", "int8"):
        config = EngineConfig(
            device="cpu", attention_backend="torch", max_num_seqs=16, kv_cache_dtype=stored
        )
        async with AsyncEngine(config) as engine:

            async def answer(engine: AsyncEngine, kind: str) -> str:
                (example,) = itertools.islice(generator.examples(78, "held-out", kind), 1)
                prompt = engine.tokenizer.encode(evaluate.prompt(example), add_special_tokens=False)
                params = SamplingParams(temperature=0.0, max_tokens=40, skip_special_tokens=False)
                async for output in engine.generate(prompt, params):
                    last = output
                return last.outputs[0].text

            kinds = sorted(KINDS)
            answers.append(await at_once(engine, *(answer(engine, kind) for kind in kinds)))
    assert answers[0] == answers[1]

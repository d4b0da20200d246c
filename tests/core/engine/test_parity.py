"""The whole engine against `transformers`: same greedy tokens, same log-probabilities."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams

from helpers import CONFIGS, VOCAB, greedy_reference, make_checkpoint, reference_model

OUTPUT = 12


def prompts(seed: int = 3) -> list[list[int]]:
    """Prompts of assorted lengths; two share a prefix of several blocks."""
    rng = random.Random(seed)
    made = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 5, 17, 40, 63)]
    made.append(made[3][:35] + [rng.randrange(3, VOCAB) for _ in range(6)])
    return made


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoint and reference continuation by configuration, made once each."""
    cache: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in cache:
            folder = make_checkpoint(name, tmp_path_factory.mktemp(name))
            model = reference_model(folder)
            cache[name] = (folder, [greedy_reference(model, p, OUTPUT) for p in prompts()])
        return cache[name]

    return get


SETTINGS = {
    "plain": {},
    "chunked, block 4": {"max_num_batched_tokens": 16, "max_num_seqs": 8, "block_size": 4},
    "tiny cache": {"num_gpu_blocks_override": 22, "block_size": 4, "max_num_batched_tokens": 32},
}


async def run(engine: AsyncEngine, prompt: list[int], **params: Any) -> Any:
    last = None
    wanted = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, **params)
    async for output in engine.generate(prompt, wanted):
        last = output
    return last


def check(output: Any, tokens: list[int], logprobs: torch.Tensor, tolerance: float) -> None:
    completion = output.outputs[0]
    assert completion.token_ids == tokens
    for step, position in enumerate(completion.logprobs):
        for token, logprob in position.items():
            assert logprob.logprob == pytest.approx(float(logprobs[step, token]), abs=tolerance)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CONFIGS)
async def test_greedy_tokens_and_logprobs_equal_transformers(
    name: str, setting: str, references: Any, device: str
) -> None:
    folder, expected = references(name)
    options = {"max_model_len": 80, "max_num_seqs": 8, **SETTINGS[setting]}
    config = EngineConfig(
        model=str(folder),
        device=device,
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="torch",
        **options,
    )
    async with AsyncEngine(config) as engine:
        results = await asyncio.gather(*(run(engine, p, logprobs=3) for p in prompts()))
        for output, (tokens, logprobs) in zip(results, expected, strict=True):
            check(output, tokens, logprobs, 1e-3)
        stats = engine.stats()
        if setting == "tiny cache":
            assert stats.num_preemptions > 0, "this setting is here to force preemption"
        else:
            again = await run(engine, prompts()[4], logprobs=3)
            assert again.num_cached_tokens >= 48, "the prompt was computed before"
            check(again, *expected[4], 1e-3)
        assert engine.stats().kv_blocks_used == 0


async def test_triton_backend_equals_transformers(references: Any, device: str) -> None:
    folder, expected = references("qwen3")
    config = EngineConfig(
        model=str(folder),
        device=device,
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="triton",
        max_model_len=80,
        max_num_seqs=8,
        max_num_batched_tokens=24,
    )
    async with AsyncEngine(config) as engine:
        chosen = (0, 2, 5)
        results = await asyncio.gather(*(run(engine, prompts()[i], logprobs=2) for i in chosen))
        for output, index in zip(results, chosen, strict=True):
            check(output, *expected[index], 1e-3)


async def test_prompt_logprobs_equal_transformers(references: Any, device: str) -> None:
    folder, _ = references("llama")
    prompt = prompts()[3]
    model = reference_model(Path(folder))
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    config = EngineConfig(
        model=str(folder),
        device=device,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=80,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    async with AsyncEngine(config) as engine:
        output = await run(engine, prompt, prompt_logprobs=2)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, (token, table) in enumerate(
        zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ):
        assert next(iter(table)) == token
        for other, logprob in table.items():
            assert logprob.logprob == pytest.approx(float(expected[position, other]), abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", CONFIGS)
async def test_bfloat16_on_a_gpu_stays_near_float32_transformers(
    name: str, backend: str, references: Any
) -> None:
    """Teacher-forced: the reference scores the tokens that the engine chose.

    Tolerance: 0.15 in log-probability for the top tokens (bfloat16 keeps 8 bits: hidden states of a
    few units carry errors near 1/64, and the head sums 64 of them).
    """
    folder, _ = references(name)
    model = reference_model(folder, "cuda")
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        attention_backend=backend,
        max_model_len=80,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=40,
    )
    async with AsyncEngine(config) as engine:
        outputs = await asyncio.gather(*(run(engine, p, logprobs=3) for p in prompts()))
    for prompt, output in zip(prompts(), outputs, strict=True):
        tokens = output.outputs[0].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0].float()
        expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].cpu()
        for step, position in enumerate(output.outputs[0].logprobs):
            for token, logprob in position.items():
                assert logprob.logprob == pytest.approx(float(expected[step, token]), abs=0.15)
            chosen = float(expected[step, tokens[step]])
            assert chosen >= float(expected[step].max()) - 0.15

"""The whole engine against `transformers`: same greedy tokens, same log-probabilities."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.cache.groups import sequence_blocks

from helpers import CONFIGS, VOCAB, at_once, greedy_reference, make_checkpoint, reference_model

OUTPUT = 8


def prompts(seed: int = 3) -> list[list[int]]:
    """Prompts of assorted lengths; two share a prefix of several blocks."""
    rng = random.Random(seed)
    token_lists = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 5, 17, 40, 63)]
    token_lists.append(token_lists[3][:35] + [rng.randrange(3, VOCAB) for _ in range(6)])
    return token_lists


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
    "tiny cache": {"block_size": 4, "max_num_batched_tokens": 32},
}
THROUGHOUT = ("llama",)
"""Run in every setting, by day."""
PREEMPTED = (
    *THROUGHOUT, "gemma3", "gpt-oss", "llama4", "mistral-window", "qwen3-moe",
)  # fmt: skip
"""Run in the tiny cache, where prompts are chunked and requests preempted. What others have of
their own, the kit for models and tests of rotations compare."""


async def fewest_blocks(config: EngineConfig) -> int:
    """Return the fewest blocks, the null block included, that hold the longest request."""
    async with AsyncEngine(config) as engine:
        groups = engine.core.info.cache_groups
    longest = max(map(len, prompts())) + OUTPUT
    return 1 + sequence_blocks(groups, longest, config.block_size, config.max_num_batched_tokens)


async def run(engine: AsyncEngine, prompt: list[int], **params: Any) -> Any:
    last = None
    params = {"max_tokens": OUTPUT, **params}
    sampling_params = SamplingParams(temperature=0.0, ignore_eos=True, **params)
    async for output in engine.generate(prompt, sampling_params):
        last = output
    return last


def check(output: Any, tokens: list[int], logprobs: torch.Tensor, tolerance: float) -> None:
    completion = output.outputs[0]
    assert completion.token_ids == tokens
    for step, position in enumerate(completion.logprobs):
        for token, logprob in position.items():
            assert logprob.logprob == pytest.approx(float(logprobs[step, token]), abs=tolerance)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param(
            name,
            setting,
            marks=()
            if name in (PREEMPTED if setting == "tiny cache" else THROUGHOUT)
            else pytest.mark.slow,
        )
        for name in CONFIGS
        for setting in SETTINGS
    ],
)
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
    if setting == "tiny cache":
        config = msgspec.structs.replace(
            config, num_gpu_blocks_override=await fewest_blocks(config)
        )
    async with AsyncEngine(config) as engine:
        results = await at_once(engine, *(run(engine, p, logprobs=3) for p in prompts()))
        for output, (tokens, logprobs) in zip(results, expected, strict=True):
            check(output, tokens, logprobs, 1e-3)
        stats = engine.stats()
        if setting == "tiny cache":
            # Behind a window a request takes no more blocks; test_cache_groups.py preempts there.
            if not any(group.reach for group in engine.core.info.cache_groups):
                assert stats.num_preemptions > 0, "this setting is here to force preemption"
        else:
            again = await run(engine, prompts()[4], logprobs=3)
            assert again.num_cached_tokens >= 48, "the prompt was computed before"
            check(again, *expected[4], 1e-3)
        assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize(
    ("name", "selection", "count"),
    [
        # What Qwen3's layers have, one of its MoE's has, too.
        pytest.param("qwen3", (0, 2, 5), 4, marks=pytest.mark.slow),
        ("qwen3-moe", (0, 5), 3),
        ("gpt-oss", (2,), 2),
        # Its last tokens begin a chunk.
        ("llama4", (3,), 4),
    ],
)
async def test_triton_backend_equals_transformers(
    name: str, selection: tuple[int, ...], count: int, references: Any, device: str
) -> None:
    folder, expected = references(name)
    config = EngineConfig(
        model=str(folder),
        device=device,
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="triton",
        operations="triton",
        max_model_len=80,
        max_num_seqs=8,
        max_num_batched_tokens=24,
    )
    async with AsyncEngine(config) as engine:
        requests = [run(engine, prompts()[i], logprobs=2, max_tokens=count) for i in selection]
        for output, index in zip(await asyncio.gather(*requests), selection, strict=True):
            tokens, logprobs = expected[index]
            check(output, tokens[:count], logprobs, 1e-3)


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
    """Teacher-forced: the float32 reference scores the tokens that the engine chose.

    Tolerance: twice the largest error of `transformers`' own bfloat16 on the same tokens, and 0.05.
    """
    folder, _ = references(name)
    model = reference_model(folder, "cuda")
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        attention_backend=backend,
        operations=backend,
        max_model_len=80,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=40,
    )
    async with AsyncEngine(config) as engine:
        outputs = await at_once(engine, *(run(engine, p, logprobs=3) for p in prompts()))
    scored = [score_on_gpu(model, p, o) for p, o in zip(prompts(), outputs, strict=True)]
    model.to(torch.bfloat16)
    halves = [score_on_gpu(model, p, o) for p, o in zip(prompts(), outputs, strict=True)]
    errors = [(a - b).abs().max() for a, b in zip(scored, halves, strict=True)]
    tolerance = 0.05 + 2 * float(max(errors))
    for output, expected in zip(outputs, scored, strict=True):
        for step, position in enumerate(output.outputs[0].logprobs):
            for token, logprob in position.items():
                assert logprob.logprob == pytest.approx(float(expected[step, token]), abs=tolerance)
            expected_logprob = float(expected[step, output.outputs[0].token_ids[step]])
            assert expected_logprob >= float(expected[step].max()) - tolerance


@torch.no_grad()
def score_on_gpu(model: Any, prompt: list[int], output: Any) -> torch.Tensor:
    """Log-probabilities [output, vocab] at the positions of an output's tokens."""
    tokens = torch.tensor([prompt + output.outputs[0].token_ids], device="cuda")
    logits = model(tokens).logits[0].float()
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].cpu()

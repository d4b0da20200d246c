"""Adapters through the whole engine, against PEFT: the same tokens, all kinds in one batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters_made import LINEAR, adapted_model, make_adapter

from jackfield import AsyncEngine, EngineConfig, LoRARequest, SamplingParams

from helpers import VOCAB, make_checkpoint, reference_model

KINDS: dict[str, dict[str, Any]] = {
    "all linear": {"target_modules": LINEAR},
    "q and v": {"target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 3},
    "q, v and o": {"target_modules": ["q_proj", "v_proj", "o_proj"], "use_rslora": True},
    "patterns": {
        "target_modules": LINEAR, "rank_pattern": {"q_proj": 1, "layers.0.mlp.down_proj": 12},
        "alpha_pattern": {"v_proj": 17},
    },
    "some layers": {"target_modules": LINEAR, "layers_to_transform": [1]},
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "lora bias": {"target_modules": LINEAR, "lora_bias": True},
    "biases": {"target_modules": ["q_proj", "o_proj"], "bias": "all"},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embeddings": {"target_modules": ["v_proj", "embed_tokens"]},
    "copies": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7, 50]},
}  # fmt: skip
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256,
    "num_gpu_blocks_override": 256, "max_num_batched_tokens": 48, "enable_lora": True,
    "max_loras": 8, "max_lora_rank": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny checkpoint, made once."""
    folder = tmp_path_factory.mktemp("models")

    def of(name: str) -> Path:
        path = folder / name
        return path if path.exists() else make_checkpoint(name, path)

    return of


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.RandomState(seed).randint(3, VOCAB, size=length).tolist()  # type: ignore


async def answer(engine: AsyncEngine, prompt: list[int], adapter: LoRARequest | None) -> Any:
    params = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False, prompt_logprobs=0,
        logprobs=0,
    )  # fmt: skip
    async for output in engine.generate(prompt, params, lora_request=adapter):
        last = output
    return last


def check(model: Any, prompt: list[int], output: Any) -> None:
    """Compare an answer with a reference model's: greedy tokens, and log-probabilities of the
    prompt."""
    tokens = list(output.outputs[0].token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits
    scores = logits[0].float().log_softmax(-1)
    assert tokens == scores[len(prompt) - 1 : -1].argmax(-1).tolist()
    scored = [
        entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:],
                                                     strict=True)
    ]  # fmt: skip
    expected = scores[torch.arange(len(prompt) - 1), prompt[1:]]
    torch.testing.assert_close(torch.tensor(scored), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
async def test_every_kind_of_adapter_gives_pefts_tokens_in_one_batch(
    name: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = models(name)
    paths = {
        kind: make_adapter(folder, tmp_path / str(number), seed=number, **settings)
        for number, (kind, settings) in enumerate(KINDS.items())
    }
    prompts = [prompt_of(number, 5 + 7 * number) for number in range(len(KINDS) + 1)]
    adapters = [None, *(LoRARequest(kind, n + 1, str(path))
                        for n, (kind, path) in enumerate(paths.items()))]  # fmt: skip
    async with AsyncEngine(EngineConfig(model=str(folder), **SETTINGS)) as engine:
        jobs = zip(prompts, adapters, strict=True)
        outputs = await asyncio.gather(*(answer(engine, *job) for job in jobs))
    references = [reference_model(folder), *(adapted_model(folder, p) for p in paths.values())]
    for model, prompt, output in zip(references, prompts, outputs, strict=True):
        check(model, prompt, output)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
async def test_adapters_of_experts_give_pefts_tokens(
    name: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = models(name)
    path = make_adapter(folder, tmp_path / "adapter", **EXPERTS)
    prompt = prompt_of(1, 30)
    adapters = [LoRARequest("experts", 1, str(path)), None]
    async with AsyncEngine(EngineConfig(model=str(folder), **SETTINGS)) as engine:
        outputs = await asyncio.gather(*(answer(engine, prompt, each) for each in adapters))
    assert not [t.name for t in threading.enumerate() if t.name.startswith("jackfield-adapters")]
    for model, output in zip(
        (adapted_model(folder, path), reference_model(folder)), outputs, strict=True
    ):
        check(model, prompt, output)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all linear", "dora", "lora bias", "head", "copies", "tokens"])
async def test_ranks_compute_what_one_does_with_an_adapter(
    kind: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = models("llama")
    path = make_adapter(folder, tmp_path / "adapter", **KINDS[kind])
    prompt = prompt_of(2, 30)
    config = EngineConfig(model=str(folder), tensor_parallel_size=2, **SETTINGS)
    async with AsyncEngine(config) as engine:
        output = await answer(engine, prompt, LoRARequest(kind, 1, str(path)))
    check(adapted_model(folder, path), prompt, output)


PLAIN = ["all linear", "q and v", "q, v and o", "patterns", "some layers"]


async def test_plain_adapters_give_pefts_tokens_in_steps_that_may_be_recorded(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Rows come and go, so that steps have from one to all of the adapters, or none."""
    folder = models("qwen2")
    paths = [
        make_adapter(folder, tmp_path / str(number), seed=number, **KINDS[kind])
        for number, kind in enumerate(PLAIN)
    ]
    adapters = [None, *(LoRARequest(str(n), n + 1, str(path)) for n, path in enumerate(paths))]
    prompts = [prompt_of(number, 4 + 9 * number) for number in range(len(adapters))]

    async def some(engine: AsyncEngine, number: int) -> list[int]:
        params = SamplingParams(
            temperature=0.0, max_tokens=8 + 6 * number, ignore_eos=True, detokenize=False
        )
        prompt, adapter = prompts[number], adapters[number]
        async for output in engine.generate(prompt, params, lora_request=adapter):
            last = output
        return list(last.outputs[0].token_ids)

    async with AsyncEngine(EngineConfig(model=str(folder), **SETTINGS)) as engine:
        outputs = await asyncio.gather(*(some(engine, number) for number in range(len(adapters))))
    references = [reference_model(folder), *(adapted_model(folder, path) for path in paths)]
    for model, prompt, tokens in zip(references, prompts, outputs, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([prompt + tokens])).logits[0]
        assert tokens == scores[len(prompt) - 1 : -1].argmax(-1).tolist()

"""Outputs say which experts computed their tokens: those that `transformers`' routers choose."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError

from helpers import VOCAB, at_once, make_checkpoint, reference_model

OUTPUT = 20
SHARED = [(3 + 7 * i) % (VOCAB - 3) + 3 for i in range(22)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def engine_of(folder: Path, **options: Any) -> AsyncEngine:
    given: dict[str, Any] = {"enable_return_routed_experts": True, "max_num_seqs": 4, **options}
    return AsyncEngine(
        EngineConfig(
            model=str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=80,
            block_size=4, **given,
        )
    )  # fmt: skip


def prompts() -> list[list[int]]:
    """Prompts of assorted lengths; some begin alike."""
    rng = random.Random(4)
    own = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 4, 17, 30, 3)]
    return [own[0], SHARED + own[1], own[2], SHARED + own[3], SHARED + own[4]]


async def answer(engine: AsyncEngine, prompt: list[int], **params: Any) -> Any:
    params = {"temperature": 0.0, "max_tokens": OUTPUT, "ignore_eos": True, **params}
    *_, last = [each async for each in engine.generate(prompt, SamplingParams(**params))]
    return last


def expected(model: Any, name: str, tokens: list[int]) -> np.ndarray:
    """[tokens, layers with a mixture, top_k], each token's in ascending order."""
    top_k = model.config.num_experts_per_tok
    chosen: list[torch.Tensor] = []

    def note(module: Any, args: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        chosen.append(logits.view(len(tokens), -1).topk(top_k).indices.sort().values)

    kinds = [m for n, m in model.named_modules() if n.endswith((".gate", ".router"))]
    hooks = [module.register_forward_hook(note) for module in kinds]
    with torch.no_grad():
        model(torch.tensor([tokens], device=model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).cpu().numpy()


def check(output: Any, model: Any, name: str) -> None:
    """Compare with what is computed of the whole text, all but its last token."""
    for completion in output.outputs:
        tokens = output.prompt_token_ids + completion.token_ids
        want = expected(model, name, tokens[:-1])
        got = completion.routed_experts
        assert got.dtype == np.uint8 and got.shape == want.shape
        assert np.array_equal(np.sort(got, axis=2), want)


SETTINGS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks, preempted": {"num_gpu_blocks_override": 22, "max_num_batched_tokens": 16},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3,
                                      "prompt_lookup_min": 1, "adaptive_width": False}},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["qwen3-moe", "mixtral", pytest.param("gpt-oss", marks=pytest.mark.slow)]
)
async def test_experts_are_those_that_routers_choose(
    name: str, checkpoints: Any, device: str
) -> None:
    """In every setting, and again from the cache of prefixes."""
    model = reference_model(checkpoints(name))
    settings = dict(SETTINGS)
    if name == "gpt-oss":  # So few blocks have no room for a window beside all tokens.
        settings["chunks"] = {"max_num_batched_tokens": 16}
        del settings["chunks, preempted"]
    for setting, options in settings.items():
        async with engine_of(checkpoints(name), device=device, **options) as engine:
            outputs = await at_once(engine, *(answer(engine, prompt) for prompt in prompts()))
            few = await answer(engine, SHARED, allowed_token_ids=[5], max_tokens=12)
            again = await answer(engine, prompts()[3])
            several = await answer(engine, prompts()[1], n=2, temperature=1.0, seed=3)
            stats = engine.stats()
        for output in (*outputs, few, again, several):
            check(output, model, name)
        assert again.num_cached_tokens >= 20
        assert setting != "chunks, preempted" or stats.num_preemptions > 0
        assert setting != "drafts" or stats.spec_decode_num_accepted_tokens > 0


async def test_they_come_with_the_end_and_only_if_they_are_kept(checkpoints: Any) -> None:
    folder = checkpoints("qwen3-moe")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    async with engine_of(folder, device="cpu") as engine:
        parts = [each async for each in engine.generate(prompts()[1], params)]
    # A reader that is late gets several tokens at once.
    assert all(each.outputs[0].routed_experts is None for each in parts[:-1])
    assert parts[-1].outputs[0].routed_experts.shape == (29, 2, 3)
    async with engine_of(folder, device="cpu", enable_return_routed_experts=False) as engine:
        assert (await answer(engine, prompts()[1])).outputs[0].routed_experts is None


async def test_a_dense_model_is_refused_by_name(checkpoints: Any) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no mixture") as raised:
        async with engine_of(checkpoints("llama"), device="cpu"):
            pass
    assert raised.value.param == "enable_return_routed_experts"

"""Suffix decoding through the engine: the same tokens, and fewer steps for known text."""

from __future__ import annotations

from typing import Any

import pytest
from rank_executor import Plugin as Ranks
from test_speculation import FEW, Asked, compare, config_of, folders, greedy, prompts, serve

from jackfield import AsyncEngine
from jackfield.core.registry import load_plugins

__all__ = ["folders"]

BLOCKS = {"qwen3": 30, "gemma3": 45}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "adaptive_width": False}


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
async def test_tokens_are_the_same(name: str, folders: Any) -> None:
    """Also where requests are preempted, and their text begins anew in another slot."""
    few = list(FEW)
    asked: Asked = [(prompt, greedy(allowed_token_ids=few)) for prompt in prompts(5)]
    asked += [
        (prompt, greedy(temperature=0.8, seed=3, allowed_token_ids=few)) for prompt in prompts(4, 1)
    ]
    asked.append(([5, 6, 7] * 4, greedy(n=3, max_tokens=12)))
    before, after = await compare(
        folders(name), asked, speculative_config=SUFFIX, num_gpu_blocks_override=BLOCKS[name]
    )
    assert after.steps < before.steps
    assert after.num_preemptions > 0


@pytest.mark.parametrize(
    "over", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["ranks", "stages"]
)
async def test_ranks_propose_alike(over: dict[str, int], folders: Any) -> None:
    """Each has tables of its own; the second half finds what the first has left in them."""
    few = list(FEW)
    asked: Asked = [(prompt, greedy(allowed_token_ids=few)) for prompt in prompts(4)]
    asked += [([3, 17, 29, number], greedy(max_tokens=20)) for number in (7, 8)] * 4
    plugins = load_plugins(extra=[Ranks()])
    options: dict[str, Any] = {"executor": "rank_threads", "max_num_seqs": 3, **over}
    await compare(folders("qwen3"), asked, plugins, speculative_config=SUFFIX, **options)


async def test_adaptive_widths_change_no_token(folders: Any) -> None:
    """Which rows get how many drafts depends on how long steps take; tokens do not."""
    few = list(FEW)
    asked: Asked = [(prompt, greedy(allowed_token_ids=few)) for prompt in prompts(4)]
    asked += [(prompt, greedy(temperature=0.8, seed=3)) for prompt in prompts(4, 1)]
    plain, _ = await serve(config_of(folders("qwen3")), asked)
    adaptive = {**SUFFIX, "adaptive_width": True}
    drafted, _ = await serve(config_of(folders("qwen3"), speculative_config=adaptive), asked)
    assert drafted == plain


async def test_an_output_is_drafted_for_its_tenant_alone(folders: Any) -> None:
    """The same request again takes fewer steps; for another tenant it does not."""
    config = config_of(folders("qwen3"), speculative_config=SUFFIX)
    prompt = [3, 17, 29, 40, 52, 11, 8]
    params = greedy(max_tokens=24, temperature=1.5, seed=5)

    async with AsyncEngine(config) as engine:

        async def asked(salt: str | None) -> tuple[list[int], int, int]:
            before = engine.stats()
            async for out in engine.generate(prompt, params, cache_salt=salt):
                last = out
            after = engine.stats()
            accepted = after.spec_decode_num_accepted_tokens
            accepted -= before.spec_decode_num_accepted_tokens
            return last.outputs[0].token_ids, after.steps - before.steps, accepted

        first, num_steps, accepted = await asked("one")
        again, num_fewer, many = await asked("one")
        other, num_same, few = await asked("two")
        assert first == again == other
        assert many > accepted + 8 and num_fewer < num_steps - 6
        assert few == accepted and abs(num_same - num_steps) <= 1

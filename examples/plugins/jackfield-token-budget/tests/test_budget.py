"""The part passes Jackfield's kit, and no group gets a token more than its budget."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams
from jackfield.core.errors import InvalidRequest
from jackfield.plugins.conformance.parts import PartKit

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "block_size": 4, "max_model_len": 96,
    "max_num_batched_tokens": 24, "num_gpu_blocks_override": 60, "max_num_seqs": 4,
    "parts": {"token_budget": {}},
}  # fmt: skip
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}


def awaited(test: Callable[..., Any]) -> Callable[..., None]:
    """A test that is a coroutine, without another plugin of pytest's."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


class TestConformance(PartKit):
    name = "token_budget"


def params(group: str | None = None, tokens: int = 0, **more: Any) -> SamplingParams:
    extra = None if group is None else {"budget_group": group, "budget_tokens": tokens}
    return SamplingParams(
        ignore_eos=True, temperature=0, output_kind=OutputKind.FINAL_ONLY, extra_args=extra,
        **{"max_tokens": 30, **more},
    )  # fmt: skip


async def outputs_of(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[Any]:
    outputs = [output async for output in engine.generate(prompt, params)]
    assert outputs[-1].error is None, outputs[-1].error
    return list(outputs[-1].outputs)


@pytest.mark.parametrize("more", [{}, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize("budget", [1, 2, 37])
@awaited
async def test_a_group_gets_its_budget_and_no_token_more(budget: int, more: Any) -> None:
    """More requests than slots, too few blocks for all, prompts in several steps."""
    prompts = [[5 + number] * (3 + 7 * number) for number in range(7)]
    async with AsyncEngine(EngineConfig(**OPTIONS, **more)) as engine:
        plain = await outputs_of(engine, prompts[0], params())
        grouped = [outputs_of(engine, prompt, params("a", budget)) for prompt in prompts]
        several = outputs_of(engine, prompts[2], params("a", budget, n=2))
        beside = outputs_of(engine, prompts[0], params())
        *members, others = await asyncio.gather(*grouped, several, beside)
        tokens = [len(output.token_ids) for outputs in members for output in outputs]
        assert sum(tokens) == budget
        assert {output.finish_reason for outputs in members for output in outputs} == {"length"}
        assert others[0].token_ids == plain[0].token_ids
        stats = engine.stats()
        assert stats.part_counts == {"token_budget.budgets_spent": 1}
        assert 'jackfield:part_count_total{count="token_budget.budgets_spent"' in (
            await engine.render_metrics()
        ).decode()  # fmt: skip

        # The group has ended, and begins anew.
        outputs = await outputs_of(engine, prompts[1], params("a", 12, max_tokens=8))
        assert len(outputs[0].token_ids) == 8


@awaited
async def test_aborted_members_have_used_what_they_got() -> None:
    async with AsyncEngine(EngineConfig(**OPTIONS)) as engine:
        long = params("a", 40, max_tokens=80)
        stream = engine.generate([5, 6, 7], SamplingParams(
            max_tokens=80, ignore_eos=True, extra_args=long.extra_args), request_id="first",
        )  # fmt: skip
        other = asyncio.ensure_future(outputs_of(engine, [7, 8, 9], long))
        async for output in stream:
            got = len(output.outputs[0].token_ids)
            if got >= 10 and not output.finished:
                await engine.abort("first")
        (ended,) = await other
        # A token may have been known, and not been in an output yet.
        assert len(ended.token_ids) + got in (39, 40)
        assert engine.stats().num_requests_running == 0


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"budget_group": "", "budget_tokens": 5}, "budget_group"),
        ({"budget_group": "x" * 129, "budget_tokens": 5}, "budget_group"),
        ({"budget_tokens": 5}, "budget_group"),
        ({"budget_group": "a"}, "budget_tokens"),
        ({"budget_group": "a", "budget_tokens": 0}, "budget_tokens"),
        ({"budget_group": "a", "budget_tokens": 2.5}, "budget_tokens"),
        ({"budget_group": "a", "budget_tokens": True}, "budget_tokens"),
    ],
)
@awaited
async def test_other_values_are_refused_by_name(extra: Any, field: str) -> None:
    from jackfield_token_budget.part import TokenBudget

    with pytest.raises(InvalidRequest, match=field):
        TokenBudget.check(SamplingParams(extra_args=extra))

"""Rows of logits are apart from rows of the plan: none, one or several of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.step import SlotStart, StepPlan
from jackfield.core.worker.batch import LogitRows, PersistentBatch, StepRows
from jackfield.core.worker.hidden_states import parts
from jackfield.core.worker.sampling import prompt_logprobs

from helpers import VOCAB, at_once, make_checkpoint, reference_model


def ragged(counts: list[int]) -> StepRows:
    slots = np.arange(len(counts), dtype=np.int32)
    return StepRows.of(slots, np.zeros_like(slots), np.asarray(counts, dtype=np.int32), slots)


def test_positions_of_sampling_rows_and_of_leading_tokens() -> None:
    rows = ragged([3, 1, 5])
    sampled = LogitRows.sampled(rows, (True, False, True))
    assert (sampled.rows.tolist(), sampled.tokens.tolist()) == ([0, 2], [2, 8])
    leading = LogitRows.leading(rows, [0, 2], [2, 4])
    assert leading.rows.tolist() == [0, 0, 2, 2, 2, 2]
    assert leading.tokens.tolist() == [0, 1, 4, 5, 6, 7]


def test_a_step_lays_out_several_rows_of_logits_for_a_row_of_the_plan() -> None:
    batch = PersistentBatch(
        max_num_seqs=3, max_model_len=32, block_size=8, device=torch.device("cpu")
    )
    starts = tuple(
        SlotStart(
            slot=slot, request_id=str(slot), token_ids=(5,) * 20, num_prompt_tokens=20,
            num_computed_tokens=8 * slot, params=SamplingParams(), seed=0,
        )
        for slot in (0, 1, 2)
    )  # fmt: skip
    plan = StepPlan(0, (0, 1, 2), (3, 1, 4), (False, True, True), starts=starts)
    writes, rows = batch.table.writes(plan), batch.rows(plan)
    logits = LogitRows(*(np.asarray(part, dtype=np.int32) for part in ([1, 2, 2], [3, 5, 6])))
    inputs = batch.lay_out(rows, logits, writes)
    assert inputs.logit_tokens.tolist() == [3, 5, 6]
    assert inputs.logit_rows == [1, 2, 2]
    assert inputs.sample_slots.tolist() == [1, 2, 2]
    assert inputs.sample_lengths.tolist() == [9, 18, 19]
    for part in (inputs.logit_tokens, inputs.sample_slots, inputs.sample_lengths):
        assert part.dtype == torch.int64


@pytest.mark.parametrize("chunk", [256, 7])
async def test_prompts_of_a_step_are_scored_together_in_bounded_chunks(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `transformers` says of each prompt alone; with prompts in chunks and beside
    requests that are not scored."""
    monkeypatch.setattr(prompt_logprobs, "SCORED_ROWS", chunk)
    folder = make_checkpoint("qwen3", tmp_path)
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32",
        skip_tokenizer_init=True, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=96,
        operations="torch", attention_backend="torch", num_gpu_blocks_override=40,
        max_logprobs=-1,
    )  # fmt: skip
    prompts = [[3 + (7 * n + at * at) % (VOCAB - 3) for at in range(5 + 9 * n)] for n in range(6)]
    num_logprobs = [None, 0, 3, 3, -1, 3]

    async def run_one(engine: AsyncEngine, number: int) -> Any:
        params = SamplingParams(
            max_tokens=2, temperature=0.0, prompt_logprobs=num_logprobs[number], ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        async for out in engine.generate(prompts[number], params):
            last = out
        return last.prompt_logprobs

    async with AsyncEngine(config) as engine:
        executor: Any = engine.core.executor
        runner = executor._worker.runner
        calls: list[int] = []
        scoring = runner.prompt_logprobs
        compute = scoring._compute_logits

        def counted(hidden: Any, places: Any) -> torch.Tensor:
            calls.append(len(parts(hidden)[0]))
            return compute(hidden, places)

        scoring._compute_logits = counted
        groups: list[Any] = []
        score = scoring.score

        def scored(*arguments: Any) -> Any:
            result = score(*arguments)
            groups.extend(result)
            return result

        scoring.score = scored
        scores = await at_once(engine, *(run_one(engine, number) for number in range(6)))
    model = reference_model(folder)
    assert scores[0] is None
    assert sum(calls) == sum(len(prompts[n]) - 1 for n in range(1, 6))
    assert max(calls) <= chunk
    assert max(len(group.spans) for group in groups) > 1
    if chunk == 256:
        # Requests of a step with the same number of top tokens share a product.
        assert len(calls) == len(groups)
    for number in range(1, 6):
        assert scores[number][0] is None and len(scores[number]) == len(prompts[number])
        with torch.no_grad():
            expected = model(torch.tensor([prompts[number]])).logits[0].log_softmax(-1)
        for at, position in enumerate(scores[number][1:]):
            own = prompts[number][at + 1]
            k = VOCAB if num_logprobs[number] == -1 else num_logprobs[number]
            top = expected[at].topk(k).indices.tolist()
            assert set(position) == {own, *top}
            for token, scored in position.items():
                assert scored.logprob == pytest.approx(float(expected[at, token]), abs=2e-4)
            assert position[own].rank == 1 + int((expected[at] > expected[at, own]).sum())

"""The tiny model finds what is asked, and policies lose it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jackfield.core.errors import ConfigError
from jackfield.examples.benchmarks.kv_recall.command import MODEL, run
from jackfield.examples.benchmarks.kv_recall.evaluate import TASKS, WHOLE, draw, evaluate
from jackfield.examples.benchmarks.kv_recall.tasks import ASK, KEYS, VALUES, copy, recall
from jackfield.examples.benchmarks.kv_recall.train import Stage, make_batch, train

LENGTH = 256


async def recalls(policy: str, ratio: float = 0.2, count: int = 10) -> dict[str, Any]:
    results = await evaluate(MODEL, policy, [ratio], draw(LENGTH, count, 0))
    if policy != WHOLE:
        # The long output is compacted three times, every other cache once.
        assert all(each["kv_compactions"] == count * (len(TASKS) - 1 + 3) for each in results)
    return {each["task"]: each for each in results}


async def test_with_its_whole_cache_the_model_answers_everything() -> None:
    """Otherwise, what a policy loses could not be told from what the model does not know."""
    for task, result in (await recalls(WHOLE, 1.0)).items():
        assert result["recall"] >= (0.9 if task == "long output" else 0.95), task


async def test_a_window_forgets_in_a_step() -> None:
    """The last half of the context stays, and nothing of the first half."""
    results = await recalls("window", 0.5)
    for task in ("question before", "question after", "second question"):
        by_depth = results[task]["by_depth"]
        assert {by_depth[0], by_depth[1]} <= {0.0, None} and by_depth[4] in (1.0, None), task
    assert 0.2 < results["many questions"]["recall"] < 0.8


@pytest.mark.slow
async def test_a_policy_that_looks_at_queries_finds_the_question_that_it_has_seen() -> None:
    chance, snap = await recalls("by_chance"), await recalls("snap_kv")
    assert snap["question before"]["recall"] >= 0.9 > chance["question before"]["recall"] + 0.2
    assert chance["many questions"]["recall"] < snap["many questions"]["recall"] < 0.97


def test_every_question_has_one_answer_in_its_context() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        sample = recall(random, 64, 16)
        assert len(sample.context) == 64
        for (ask, key), (value,), depth in zip(
            sample.questions, sample.answers, sample.depths, strict=True
        ):
            (place,) = [n for n, token in enumerate(sample.context) if token == key]
            assert ask == ASK and key in KEYS and value in VALUES
            assert sample.context[place + 1] == value and depth == place / 64
        passage = copy(random, 64)
        start = passage.context.index(passage.questions[0][1])
        (rest,) = passage.answers
        assert passage.context[start + 1 : start + 1 + len(rest)] == rest


def test_training_learns() -> None:
    """A few steps: the loss of copies and questions falls, and a checkpoint is written."""
    batch = make_batch(np.random.default_rng(1), Stage(24, 6, 8, 1))
    assert batch.tokens.shape == batch.positions.shape == batch.targets.shape
    assert (batch.positions.diff(dim=1)[:, :24] > 0).all() and (batch.targets >= 0).any()
    asked = batch.targets >= 0
    # The answer to a question is the token that follows it in the same sequence.
    after = torch.roll(batch.tokens, -1, dims=1)
    assert torch.equal(batch.targets[asked], after[asked])


def test_a_model_is_trained_into_a_folder(tmp_path: Path) -> None:
    accuracy = train(tmp_path, seed=3, stages=(Stage(24, 6, 16, 3),))
    assert 0.0 <= accuracy < 0.5, "three steps teach nothing yet"
    assert json.loads((tmp_path / "trained.json").read_text())["seed"] == 3
    assert (tmp_path / "model.safetensors").stat().st_size < 300_000


def test_results_are_json_lines_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "lines.jsonl"
    words = ["--policies", "key_diff", "--ratios", "0.5", "--lengths", "128", "--samples", "2"]
    assert run([*words, "--output", str(output)]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [each["policy"] for each in records[:: len(TASKS)]] == [WHOLE, "by_chance", "key_diff"]
    assert {each["task"] for each in records} == set(TASKS)
    assert "key_diff" in capsys.readouterr().err
    for wrong, name in (
        (["--ratios", "1.5"], "--ratios"), (["--lengths", "9"], "--lengths"),
        (["--samples", "0"], "--samples"), (["--train", "1"], "--train"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            run(wrong)

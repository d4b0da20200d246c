"""Log-probabilities are of the kind that `logprobs_mode` says: against transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError

from helpers import make_checkpoint, reference_model

PROMPT = list(range(3, 20))
LEFT_OUT = -9999.0
CASES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.8, "top_k": 4},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.8},
    {"temperature": 1.1, "min_p": 0.2},
    {"temperature": 0.6, "logit_bias": {7: 3.0}},
    {"temperature": 0.9, "frequency_penalty": 1.5},
]
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


def processed(logits: torch.Tensor, outputs: list[int], case: dict[str, Any]) -> torch.Tensor:
    """What is sampled from, by the definitions of the parameters."""
    logits = logits.clone()
    for token, bias in case.get("logit_bias", {}).items():
        logits[token] += bias
    for token in outputs:
        logits[token] -= case.get("frequency_penalty", 0.0)
    logits /= case["temperature"] or 1.0
    probs = logits.softmax(-1)
    kept = probs >= case.get("min_p", 0.0) * probs.max()
    order = logits.argsort(descending=True, stable=True)
    if "top_k" in case:
        kept[order[case["top_k"] :]] = False
    if "top_p" in case:
        ranked = torch.where(kept, logits, -torch.inf).softmax(-1)[order]
        kept[order[ranked.cumsum(-1) - ranked >= case["top_p"]]] = False
    return torch.where(kept, logits, -torch.inf)


@pytest.mark.parametrize("mode", MODES)
async def test_numbers_are_of_the_kind_that_is_asked_for(mode: str, folder: Path) -> None:
    model = reference_model(folder)
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=64, num_gpu_blocks_override=64, logprobs_mode=mode,  # type: ignore[arg-type]
    )  # fmt: skip
    async with AsyncEngine(config) as engine:
        for seed, case in enumerate(CASES):
            params = SamplingParams(
                **case, seed=seed, max_tokens=6, ignore_eos=True, logprobs=12, prompt_logprobs=2
            )
            async for output in engine.generate(PROMPT, params):
                last = output
            tokens = list(last.outputs[0].token_ids)
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT + tokens])).logits[0]
            rows = logits[len(PROMPT) - 1 : -1]
            for number, (row, table) in enumerate(
                zip(rows, last.outputs[0].logprobs or (), strict=True)
            ):
                if mode.startswith("processed"):
                    row = processed(row, tokens[:number], case)
                if mode.endswith("logprobs"):
                    row = row.log_softmax(-1)
                want = row.clamp(min=LEFT_OUT)
                assert tokens[number] in table and want[tokens[number]] > LEFT_OUT
                got = torch.tensor([entry.logprob for entry in table.values()])
                torch.testing.assert_close(got, want[list(table)], atol=2e-3, rtol=1e-4)
            prompt = last.prompt_logprobs or []
            for row, token, table in zip(logits, PROMPT[1:], prompt[1:], strict=False):
                want = row.log_softmax(-1) if mode.endswith("logprobs") else row
                assert abs(table[token].logprob - float(want[token])) < 2e-3  # type: ignore[index]


def test_kernels_compute_raw_ones_alone(folder: Path) -> None:
    from types import SimpleNamespace

    from jackfield.core.nn.operations import Operations
    from jackfield.core.worker.start.make_runner import check_logprobs_mode

    class Kernels(Operations):
        samples = True

    config: Any = SimpleNamespace(logprobs_mode="processed_logprobs")
    check_logprobs_mode(config, Operations())
    with pytest.raises(ConfigError, match="operations=torch") as caught:
        check_logprobs_mode(config, Kernels())
    assert caught.value.param == "logprobs_mode"
    config.logprobs_mode = "raw_logprobs"
    check_logprobs_mode(config, Kernels())

"""ZAYA1 says what `transformers` says, through the engine: in chunks, beside others, and from the
cache of prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import (
    check_divided,
    check_logits,
    checkpoint,
    make_reference,
    score,
)
from test_state_families import PROMPTS, answer, check, config

from jackfield import AsyncEngine
from jackfield.core.errors import ConfigError
from jackfield.plugins.conformance.paged_model import PagedModel

from helpers import at_once

ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5}
ZAYA: dict[str, Any] = {
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 12,
    "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 48,
    "router_hidden_size": 24, "attention_bias": False, "rope_parameters": {
        "hybrid": {**ROPE, "rope_theta": 500.0}, "hybrid_sliding": {**ROPE, "rope_theta": 100.0},
    },
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "ZayaForCausalLM": ZAYA,
    "ZayaForCausalLM:longer convolutions": {
        **ZAYA,
        "cca_time0": 4,
        "cca_time1": 3,
        "lm_head_bias": True,
    },
}


def reference_and_folder(case: str, folder: Path) -> tuple[Any, Path]:
    reference = make_reference(case, CASES[case])
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.mlp.gate.router_mlp.out_proj.weight.mul_(8.0)
            layer.mlp.gate.balancing_biases.copy_(torch.tensor([0.1, -0.1, 0.05, -0.05, 0.2]))
    return reference, checkpoint(reference, case.partition(":")[0], folder)


@pytest.mark.parametrize("case", CASES)
async def test_zaya_equals_transformers(case: str, tmp_path: Path) -> None:
    reference, folder = reference_and_folder(case, tmp_path)
    chosen: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.mlp.gate.register_forward_hook(lambda *call: chosen.append(call[2][1] == 0))
    check_logits(folder, reference)
    ratio = float(torch.cat([each.flatten() for each in chosen]).float().mean())
    assert 0.05 < ratio < 0.8, "some tokens choose the expert that adds nothing, others do not"
    check_divided(folder, case.partition(":")[0])
    async with AsyncEngine(config(folder, num_gpu_blocks_override=96)) as engine:
        prompts = [*PROMPTS, PROMPTS[1]]
        answers = await at_once(engine, *(answer(engine, prompt) for prompt in prompts))
        again = await answer(engine, PROMPTS[2])
        engine.core.check_idle()
    assert again.num_cached_tokens >= 16
    for prompt, output in zip([*prompts, PROMPTS[2]], [*answers, again], strict=True):
        check(prompt, output, lambda tokens: score(reference, tokens))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_kernels_equal_transformers(tmp_path: Path) -> None:
    """A prompt in two steps, beside a decode row in the second one, and a step of decode rows."""
    pytest.importorskip("triton")
    reference, folder = reference_and_folder("ZayaForCausalLM", tmp_path)
    model = PagedModel(folder, "float32", kernels="triton")
    first, other = PROMPTS[2], PROMPTS[1]
    steps = (
        {0: first[:20], 1: other[:4]}, {1: other[4:5], 0: first[20:40]}, {0: first[40:], 1: [9]},
    )  # fmt: skip
    results = [model.run(step) for step in steps]
    for slot, tokens in ((0, first), (1, [*other, 9])):
        got = torch.cat([result[slot] for result in results]).log_softmax(-1).cpu()
        torch.testing.assert_close(got, score(reference, tokens), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("field", "value"), [("attention_bias", True), ("cca_time0", 1)])
def test_what_zaya_lacks_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    _, folder = reference_and_folder("ZayaForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match=field) as caught:
        PagedModel(folder, "float32", load_format="dummy", hf_overrides={field: value})
    assert caught.value.param == field


def test_what_layers_hand_on_does_not_outlast_the_step(tmp_path: Path) -> None:
    """Recorded steps keep their contexts."""
    _, folder = reference_and_folder("ZayaForCausalLM", tmp_path)
    model = PagedModel(folder, "float32")
    contexts: list[Any] = []
    handed: list[int] = []
    model.model.register_forward_pre_hook(lambda _, inputs: contexts.append(inputs[1]))
    layers: Any = model.model.model.layers  # type: ignore[union-attr]
    layers[1].register_forward_pre_hook(lambda _, inputs: handed.append(len(inputs[2].shared)))
    model.hidden({0: [5, 6, 7]})
    assert handed == [1] and [context.shared for context in contexts] == [{}]

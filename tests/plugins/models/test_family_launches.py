"""What a decode step of one row launches: in no family more per layer than in Llama, or little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launches import Launches
from test_families import CASES, checkpoint, make_reference

from jackfield.plugins.conformance.models import PagedModel

from helpers import interpreted

pytest.importorskip("triton")

LLAMA = {"_fused_decode_kernel": 1, "_gemv_kernel": 4}
"""Of one layer."""
MORE: dict[str, dict[str, int]] = {
    "ApertusForCausalLM": {"_xielu_kernel": 1, "empty_like": 1},
    "BloomForCausalLM": {"layer_norm": 1},
    "Cohere2ForCausalLM": {},
    "FalconForCausalLM:one key": {},
    "GPT2LMHeadModel": {"embedding": 1, "add": 2},
    "GPTJForCausalLM": {},
    "GPTNeoXForCausalLM": {},
    "HunYuanDenseV1ForCausalLM": {},
    "NemotronForCausalLM": {},
    "Starcoder2ForCausalLM": {},
}
"""Besides: of an activation with weights, and of what comes before the first layer."""
BY_DAY = (
    "ApertusForCausalLM",
    "BloomForCausalLM",
    "GPTNeoXForCausalLM",
    "HunYuanDenseV1ForCausalLM",
)
STEP = {"embedding": 1, "zeros": 1}
"""What every step begins with, and the positions that `PagedModel` makes."""


@interpreted
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in BY_DAY)) for case in MORE]
)
def test_a_layer_of_one_row_is_five_launches(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says what it says by torch."""
    one = {"num_hidden_layers": 1}
    if "layer_types" in CASES[case]:
        one["layer_types"] = ["sliding_attention"]  # type: ignore[assignment]
    reference = make_reference(case, {**CASES[case], **one})
    folder = checkpoint(reference, case.partition(":")[0], tmp_path)
    counted, plain = (PagedModel(folder, "float32", kernels=k) for k in ("triton", "torch"))
    for model in (counted, plain):
        model.run({0: [5, 6, 7]})
    forward, launches = counted.model.forward, Launches(monkeypatch)

    def watched(*args: Any) -> Any:
        with launches:
            return forward(*args)

    monkeypatch.setattr(counted.model, "forward", watched)
    hidden = counted.hidden({0: [9]})
    monkeypatch.undo()
    wanted = LLAMA | STEP
    for name, count in MORE[case].items():
        wanted[name] = wanted.get(name, 0) + count
    assert launches.counts == wanted
    want = plain.logits(plain.hidden({0: [9]}))
    torch.testing.assert_close(counted.logits(hidden), want, atol=1e-4, rtol=1e-4)

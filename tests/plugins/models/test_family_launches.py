"""What a decode step of one row launches: in no family more per layer than in Llama, or little."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import launches_of_one_row
from test_families import CASES, checkpoint, make_reference

from helpers import interpreted

pytest.importorskip("triton")

LLAMA = {"_fused_decode_kernel": 1, "_gemv_kernel": 4}
"""Of one layer."""
MORE: dict[str, dict[str, int]] = {
    "ApertusForCausalLM": {"_xielu_kernel": 1, "empty_like": 1},
    "BloomForCausalLM": {"layer_norm": 1},
    "Cohere2ForCausalLM": {},
    "FalconForCausalLM:one key": {},
    "GPT2LMHeadModel": {},
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
    wanted = Counter(LLAMA) + Counter(MORE[case])
    assert launches_of_one_row(folder, monkeypatch) == wanted


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("GPTNeoXForCausalLM"), pytest.param("NemotronForCausalLM"),
        pytest.param("GPT2LMHeadModel", marks=pytest.mark.slow),
        pytest.param("Cohere2ForCausalLM", marks=pytest.mark.slow),
        pytest.param("FalconForCausalLM", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_products_know_the_layer_norms_before_them(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits, of each layer's attention and MLP; a step says what it says by torch."""
    from jackfield.plugins.conformance.paged_model import PagedModel
    from jackfield.plugins.operations import layers as operations

    reference = make_reference(case, CASES[case])
    count = 2 * reference.config.num_hidden_layers
    folder = checkpoint(reference, case.partition(":")[0], tmp_path)
    sums: list[object] = []
    gemv = operations.gemv

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        if "layer_norm" in options:
            sums.append(options["norm_sums"])
        return gemv(*args, **options)

    monkeypatch.setattr(operations, "gemv", noted)
    logits = []
    for kernels in ("triton", "torch"):
        model = PagedModel(folder, "float16", kernels=kernels)
        model.run({0: [5, 6, 7]})
        hidden = model.hidden({0: [8]})
        logits.append(model.logits(hidden).float())
    layers, last = sums[:count], sums[count:]
    assert len(layers) == count and None not in layers
    assert set(map(type, last)) <= {type(None)}, "the norm before the vocabulary has none"
    torch.testing.assert_close(*logits, atol=0.02, rtol=0.02)


@interpreted
def test_heads_of_512_channels_go_through_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4's layers without a window, in float32 by two; a step says what it says by torch."""
    case = "Gemma4UnifiedForCausalLM"
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    folder = checkpoint(make_reference(case, {**CASES[case], **one}), case, tmp_path)
    counts = launches_of_one_row(folder, monkeypatch)
    assert counts["_decode_kernel"] == counts["_qk_norm_rope_cache_kernel"] == 1

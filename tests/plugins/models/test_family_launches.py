"""What a decode step of one row launches: in no family more per layer than in Llama, or little."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
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
def test_heads_of_512_channels_go_through_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4's layers without a window, in float32 by two; a step says what it says by torch."""
    case = "Gemma4UnifiedForCausalLM"
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    folder = checkpoint(make_reference(case, {**CASES[case], **one}), case, tmp_path)
    counts = launches_of_one_row(folder, monkeypatch)
    assert counts["_decode_kernel"] == counts["_qk_norm_rope_cache_kernel"] == 1

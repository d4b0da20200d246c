"""What a decode step of one row launches in layers that keep states."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launches import launches_of_one_row
from test_families import checkpoint, make_reference
from test_state_families import CASES

from helpers import interpreted

pytest.importorskip("triton")

MAMBA2 = {"_gemv_kernel": 2, "_mamba2_step_kernel": 1}
FALCON = {"_gemv_kernel": 6, "_mamba2_step_kernel": 1, "_fused_decode_kernel": 1}
"""The projections, attention and the MLP."""
LAYERS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "Mamba2ForCausalLM": ({"n_groups": 1}, MAMBA2),
    "FalconH1ForCausalLM": ({"mamba_n_groups": 1}, FALCON),
    "FalconH1ForCausalLM:norm first": ({"mamba_n_groups": 1}, FALCON),
    "NemotronHForCausalLM": ({"layers_block_type": ["linear_attention"]}, MAMBA2),
    "Qwen3_5ForCausalLM": (
        {"layer_types": ["linear_attention"]}, {"_gemv_kernel": 4, "_delta_net_step_kernel": 1},
    ),
}  # fmt: skip
"""Of one layer; Falcon-H1 also scales embeddings."""


@interpreted
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] * (c == "FalconH1ForCausalLM")) for c in LAYERS],
)
def test_a_layer_of_one_row_is_one_launch_between_products(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says what it says by torch."""
    changes, wanted = LAYERS[case]
    reference = make_reference(case, {**CASES[case], "num_hidden_layers": 1, **changes})
    folder = checkpoint(reference, case.partition(":")[0], tmp_path)
    assert launches_of_one_row(folder, monkeypatch) == Counter(wanted)

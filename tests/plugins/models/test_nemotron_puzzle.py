"""Nemotron 3 Puzzle as it is published in NVFP4: experts in 4 bits, other products in fp8, and
layers of sizes of their own, some of them left as they are."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import formulas_of_states
import pytest
import torch
from formulas import Tensors
from safetensors.torch import save_file
from test_families import PROMPTS
from test_formulas import save

from jackfield.core.loading.quantize import quantized_layers
from jackfield.plugins.conformance.divided_models import check_ranks
from jackfield.plugins.conformance.kit import Kit
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.quantization.nvfp4 import Nvfp4Linear

CASE = "NemotronHPuzzleForCausalLM"
FP8 = torch.float8_e4m3fn
NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
IN_FP8 = re.compile(r"\.(in_proj|out_proj|shared_experts\.(up|down)_proj)$")
IN_4_BITS = re.compile(r"\.experts\.\d+\.(up|down)_proj$")
IGNORED = "backbone.layers.5.mixer.shared_experts"


@pytest.fixture
def whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of which each is a multiple of 16."""
    config = copy.deepcopy(formulas_of_states.PUZZLE)
    config["block_configs"][2]["moe_latent_size"] = 32
    config["block_configs"][5] |= {
        "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 48,
    }  # fmt: skip
    monkeypatch.setitem(formulas_of_states.PUZZLE, "block_configs", config["block_configs"])


def in_4_bits(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Return the stored tensors, and what they stand for."""
    groups = weight.unflatten(1, (-1, 16))
    whole = groups.abs().max() / (6 * 448)
    scale = (groups.abs().amax(2) / 6 / whole).to(FP8)
    step = scale.float()[..., None] * whole
    number = (groups.abs()[..., None] / step[..., None] - NUMBERS).abs().argmin(-1)
    bits = (number + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    signs = torch.where(groups < 0, -1.0, 1.0)
    stored = {"weight": bits[:, 0::2] | bits[:, 1::2] << 4, "weight_scale": scale}
    stored |= {"weight_scale_2": whole, "input_scale": torch.tensor(0.01)}
    return stored, (NUMBERS[number] * signs * step).flatten(1)


def in_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(FP8)
    found = {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.05)}
    return found, stored.float() * scale


def test_layers_of_a_checkpoint_in_nvfp4_are_found(whole_groups: None, tmp_path: Path) -> None:
    """Against the same model with the weights that the stored ones stand for."""
    plain = tmp_path / "plain"
    plain.mkdir()
    tensors = save(CASE, plain)
    stored: Tensors = {}
    layers: dict[str, Any] = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        own = re.sub(r"^model\.", "backbone.", layer)
        kind = "NVFP4" if IN_4_BITS.search(layer) else "FP8" if IN_FP8.search(layer) else None
        if kind is None or own.startswith(IGNORED):
            stored[re.sub(r"^model\.", "backbone.", name)] = tensor
            continue
        parts, dense = (in_4_bits if kind == "NVFP4" else in_fp8)(tensor)
        stored |= {f"{own}.{part}": value for part, value in parts.items()}
        tensors[name] = dense
        layers[own] = {"quant_algo": kind} | ({"group_size": 16} if kind == "NVFP4" else {})
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers,
        "ignore": [f"{IGNORED}*", "lm_head"], "producer": {"name": "modelopt"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = PROMPTS[1]
    model = PagedModel(tmp_path, "float32")
    found = quantized_layers(model.model)
    assert sum(isinstance(layer, Nvfp4Linear) for layer in found.values()) == 4
    assert len(found) == 4 + 2 + 2
    expected = PagedModel(plain, "float32").run({0: prompt})[0]
    got = model.run({0: prompt})[0]
    rounded = torch.cuda.is_available()  # Products in 8 bits round their inputs there.
    if rounded:
        assert (got - expected).norm() < 0.15 * expected.norm()
    else:
        torch.testing.assert_close(got, expected, atol=2e-3, rtol=0)
    check_ranks(tmp_path, CASE, 2, Kit.plugins(), 5e-2 if rounded else 2e-3)

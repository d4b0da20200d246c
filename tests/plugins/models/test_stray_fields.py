"""Fields of config.json that a family's class in `transformers` does not have change nothing."""

from __future__ import annotations

import re
from inspect import getsource
from pathlib import Path
from sys import modules
from typing import Any

import pytest
import test_families
import test_state_families
import torch
import transformers
from test_families import LEFT_OUT

from jackfield.plugins.conformance.models import tiny
from jackfield.plugins.conformance.paged_model import PagedModel

from helpers import edit_json

STRAYS: dict[str, Any] = {
    "num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 8, "attention_bias": True,
    "mlp_bias": True, "sliding_window": 5, "hidden_act": "relu", "num_experts": 4,
    "num_local_experts": 4, "moe_intermediate_size": 24, "rope_theta": 3.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "layer_norm_eps": 0.5,
    "layer_norm_epsilon": 0.5, "norm_epsilon": 0.5, "rms_norm_eps": 0.5, "use_bias": False,
    "enable_bias": False, "bias": False, "n_inner": 40, "ffn_dim": 40, "ffn_hidden_size": 40,
    "activation_function": "relu", "n_shared_experts": 1, "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
"""Fields that some families have."""
PLAIN = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3", "Olmo2", "Granite",
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    **{f"{name}ForCausalLM": {} for name in PLAIN},
    **{name: fields for name, fields in test_families.CASES.items() if ":" not in name},
    **{name: fields for name, fields in test_state_families.CASES.items() if ":" not in name},
}
PROMPT = [3 + 7 * i % 89 for i in range(12)]


def saved(name: str, folder: Path) -> Any:
    """Save the tiny configuration of a family, and return its class."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    kind = getattr(transformers, name).config_class
    fields = {**tiny(kind), **FAMILIES[name]}
    config = kind(**{key: value for key, value in fields.items() if value is not LEFT_OUT})
    config.architectures = [name]
    config.save_pretrained(folder)
    return kind


def strays_of(name: str, kind: Any) -> dict[str, Any]:
    """Return the fields that a class does not have, and that its models do not ask for."""
    known = kind()
    known.allow_global_per_layer_attribute_access = True
    rotates = hasattr(known, "rope_parameters")
    strays = {key: value for key, value in STRAYS.items() if not hasattr(known, key)}
    asked = getsource(modules[getattr(transformers, name).__module__])
    return {
        key: value for key, value in strays.items()
        if not re.search(rf"config\.{key}\b|[\"']{key}[\"']", asked)
        and not (rotates and key in ("rope_theta", "rope_scaling", "partial_rotary_factor"))
    }  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_does_not_have_changes_nothing(name: str, tmp_path: Path) -> None:
    kind = saved(name, tmp_path)
    results = []
    for fields in ({}, strays_of(name, kind)):
        edit_json(tmp_path / "config.json", **fields)
        model = PagedModel(tmp_path, "float32", load_format="dummy")
        results.append(model.run({0: PROMPT})[0])
    torch.testing.assert_close(results[1], results[0], atol=0, rtol=0)
    assert results[0].isfinite().all()

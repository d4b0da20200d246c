"""Dory says what `transformers` says, from checkpoints as they are published and as `transformers`
saves them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import (
    PROMPTS,
    check_divided,
    check_engine,
    check_logits,
    checkpoint,
    make_reference,
    score,
)

from jackfield.core.errors import ConfigError
from jackfield.plugins.conformance.paged_model import PagedModel

from helpers import edit_json

NAME = "DoryForCausalLM"
DORY = {
    "num_hidden_layers": 5, "n_input_layers": 1, "n_output_layers": 2, "n_recurrent_loops": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    "sliding_window": 12, "initializer_range": 0.5, "ngpt_alpha_init": 0.4,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "DoryForCausalLM": DORY,
    "DoryForCausalLM:all layers run once": {
        **DORY, "n_input_layers": 0, "n_output_layers": 0, "n_recurrent_loops": 1,
    },
}  # fmt: skip
RATES = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha"}


def published_name(name: str) -> str:
    """Return a tensor's name in published checkpoints; `name`: in those of `transformers`."""

    def number(at: re.Match[str]) -> str:
        second = at[2] in ("mlp", "lambda_2")
        return f"layers.{2 * int(at[1]) + second}.{RATES.get(at[2], 'mixer')}"

    return re.sub(r"layers\.(\d+)\.(self_attn|mlp|lambda_1|lambda_2)\b", number, name)


@torch.no_grad()
def make_dory(case: str = NAME) -> Any:
    """A random model with rates of both signs, and answers so short that what is added to lengths
    counts."""
    model = make_reference(case, CASES[case])
    for name, parameter in model.named_parameters():
        if ".lambda_" in name:
            parameter[::2] *= -1
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter *= 1e-3
    return model


def folder_of(reference: Any, folder: Path) -> Path:
    path = checkpoint(reference, NAME, folder) / "model.safetensors"
    tensors = {published_name(name): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("case", CASES)
async def test_a_dory_equals_transformers(case: str, tmp_path: Path) -> None:
    reference = make_dory(case)
    folder = folder_of(reference, tmp_path)
    check_logits(folder, reference)
    check_divided(folder, NAME)
    await check_engine(folder, lambda tokens: score(reference, tokens))


def test_what_transformers_saves_is_the_same_model(tmp_path: Path) -> None:
    reference = make_dory()
    saved = PagedModel(checkpoint(reference, NAME, tmp_path / "saved"), "float32")
    published = PagedModel(folder_of(reference, tmp_path / "published"), "float32")
    assert torch.equal(saved.run({0: PROMPTS[0]})[0], published.run({0: PROMPTS[0]})[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [("recurrent_kv_cache_mode", "last_loop"), ("attention_bias", True), ("hidden_act", "gelu")],
)
def test_what_it_lacks_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    folder = checkpoint(make_dory(), NAME, tmp_path)
    with pytest.raises(ConfigError, match=field) as caught:
        PagedModel(folder, "float32", load_format="dummy", hf_overrides={field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("own", [None, {"rope_type": "default", "rope_theta": None}])
def test_a_layer_type_without_a_rope_is_refused_by_name(own: Any, tmp_path: Path) -> None:
    folder = checkpoint(make_dory(), NAME, tmp_path)
    ropes = DORY["rope_parameters"] | {"full_attention": own}
    edit_json(folder / "config.json", rope_parameters={k: v for k, v in ropes.items() if v})
    with pytest.raises(ConfigError, match=r"rope_parameters\.full_attention: must be|rope_theta"):
        PagedModel(folder, "float32")

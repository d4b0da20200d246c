"""The table of angles against `transformers`' rotary module, up to the last position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jackfield import EngineConfig
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.rotary import Rotary

from helpers import COMMON

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-whole-turns-only": {
        "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False,
    },
    "yarn-mscale": {
        "factor": 40.0, "original_max_position_embeddings": 128, "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn-factor": {
        "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
        "beta_slow": 2.0, "attention_factor": 1.25,
    },
}  # fmt: skip


def tables(
    folder: Path, name: str, max_model_len: int, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """→ ours and theirs, [max_model_len, rotary_dim] each: cosines, then sines."""
    rope = {"rope_type": name.partition("-")[0], "rope_theta": 10000.0, **ROPES[name], **changes}
    hf = LlamaConfig(**COMMON, rope_parameters=rope, architectures=["LlamaForCausalLM"])
    (folder / "config.json").write_text(json.dumps(hf.to_dict()))
    config = EngineConfig(model=str(folder), device="cpu", max_model_len=max_model_len)
    build = BuildContext(device=torch.device("cpu"), dtype=torch.float32, operations=Operations())
    ours = Rotary(resolve_model_config(config), build).cos_sin
    positions = torch.arange(max_model_len)[None]
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1, dtype=torch.float32), positions)
    half = cos.shape[-1] // 2
    return ours, torch.cat([cos[0, :, :half], sin[0, :, :half]], -1)


@pytest.mark.parametrize("name", ROPES)
def test_angles_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    ours, theirs = tables(tmp_path, name, 512)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


@pytest.mark.parametrize("length", [513, 1000, 2048])
def test_dynamic_angles_beyond_the_original_length(tmp_path: Path, length: int) -> None:
    """As transformers has them for a sequence of `max_model_len` tokens."""
    ours, theirs = tables(tmp_path, "dynamic", length)
    torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=0)
    plain, _ = tables(tmp_path, "default", 512)
    assert not torch.allclose(ours[:512], plain, atol=1e-2), "the base has changed"


def test_dynamic_angles_within_the_original_length_are_plain(tmp_path: Path) -> None:
    ours, _ = tables(tmp_path, "dynamic", 512)
    plain, _ = tables(tmp_path, "default", 512)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("name", [name for name in ROPES if name not in ("default", "dynamic")])
def test_each_variant_differs_from_the_plain_rope(tmp_path: Path, name: str) -> None:
    """Or the comparison above would show little."""
    ours, _ = tables(tmp_path, name, 512)
    plain, _ = tables(tmp_path, "default", 512)
    assert (ours - plain).abs().max() > 0.1

"""The table of angles against `transformers`' rotary module, up to the last position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from jackfield import EngineConfig
from jackfield.core.errors import ConfigError
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


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [1.5, 2.0, 3.0, 5.0, 9.0, 17.0],
}  # fmt: skip
ORIGINAL = 64


def long_tables(
    folder: Path, max_model_len: int, length: int, **rope: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """→ ours for an engine of `max_model_len` and theirs for a text of `length`, [length, 12]."""
    hf = Phi3Config(
        **COMMON,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=LONGROPE | rope,
        architectures=["Phi3ForCausalLM"],
    )
    (folder / "config.json").write_text(json.dumps(hf.to_dict()))
    config = EngineConfig(model=str(folder), device="cpu", max_model_len=max_model_len)
    build = BuildContext(device=torch.device("cpu"), dtype=torch.float32, operations=Operations())
    ours = Rotary(resolve_model_config(config), build).cos_sin[:length]
    positions = torch.arange(length)[None]
    cos, sin = Phi3RotaryEmbedding(hf)(torch.zeros(1, dtype=torch.float32), positions)
    half = cos.shape[-1] // 2
    return ours, torch.cat([cos[0, :, :half], sin[0, :, :half]], -1)


@pytest.mark.parametrize(
    "rope", [{}, {"factor": 3.0}, {"attention_factor": 0.7}], ids=["by length", "factor", "given"]
)
@pytest.mark.parametrize(("max_model_len", "length"), [(40, 30), (64, 64), (65, 65), (512, 300)])
def test_longrope_angles_equal_those_of_transformers(
    tmp_path: Path, max_model_len: int, length: int, rope: dict[str, Any]
) -> None:
    """For every text where `max_model_len` is within the original context, else for long ones."""
    ours, theirs = long_tables(tmp_path, max_model_len, length, **rope)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


def test_longrope_has_one_table_for_all_texts(tmp_path: Path) -> None:
    """Where long ones may come, short ones get the long factors: their keys stay in the cache."""
    within, theirs = long_tables(tmp_path, 512, ORIGINAL)
    beyond, _ = long_tables(tmp_path, 512, 300)
    assert torch.equal(within, beyond[:ORIGINAL])
    assert (within - theirs).abs().max() > 0.1


def test_a_longrope_that_makes_no_sense_is_refused_by_name(tmp_path: Path) -> None:
    hf = LlamaConfig(**COMMON, architectures=["LlamaForCausalLM"]).to_dict()
    rope = LONGROPE | {"factor": 2.0, "original_max_position_embeddings": ORIGINAL}
    build = BuildContext(device=torch.device("cpu"), dtype=torch.float32, operations=Operations())
    original = "original_max_position_embeddings"
    for length, name, wrong, text in (
        (40, "short_factor", [1.0] * 5, "must be a list of 6 numbers"),
        (512, "long_factor", [1.0] * 5 + [0.0], "must be a list of 6 numbers"),
        (512, original, 1, "1 is no context"),
    ):
        edited = hf | {"rope_parameters": rope | {name: wrong}}
        (tmp_path / "config.json").write_text(json.dumps(edited))
        config = EngineConfig(model=str(tmp_path), device="cpu", max_model_len=length)
        with pytest.raises(ConfigError, match=f"{name}: {text}"):
            Rotary(resolve_model_config(config), build)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "rope_theta": 1.0}, "rope_theta: must be more than 1"),
        ({"rope_type": "yarn", "beta_fast": -32}, r"rope_scaling\.beta_fast must be positive"),
        ({"rope_type": "llama3", "low_freq_factor": 0.0}, "low_freq_factor: must be more than 0"),
        ({"rope_type": "llama3", "high_freq_factor": 1.0}, "less than high_freq_factor 1, got 1"),
    ],
)
def test_numbers_that_no_rope_has_are_refused_by_name(
    rope: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = {
        "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }  # fmt: skip
    hf = LlamaConfig(**COMMON, architectures=["LlamaForCausalLM"]).to_dict()
    del hf["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(hf | {"rope_scaling": whole | rope}))
    build = BuildContext(device=torch.device("cpu"), dtype=torch.float32, operations=Operations())
    with pytest.raises(ConfigError, match=message):
        Rotary(resolve_model_config(EngineConfig(model=str(tmp_path), device="cpu")), build)


def test_a_number_that_a_rope_lacks_is_named(tmp_path: Path) -> None:
    """Of a configuration that `transformers` does not check."""
    hf = LlamaConfig(**COMMON, architectures=["LlamaForCausalLM"]).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config = resolve_model_config(EngineConfig(model=str(tmp_path), device="cpu"))
    build = BuildContext(device=torch.device("cpu"), dtype=torch.float32, operations=Operations())
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0}
    with pytest.raises(ConfigError, match=r"original_max_position_embeddings: .* needs it"):
        Rotary(config, build, rope)


def test_a_length_and_a_factor_beyond_any_number_are_a_length(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 1e299, "original_max_position_embeddings": 10**299}
    hf = LlamaConfig(**COMMON, architectures=["LlamaForCausalLM"]).to_dict()
    del hf["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(hf | {"rope_scaling": rope}))
    config = resolve_model_config(EngineConfig(model=str(tmp_path), device="cpu"))
    assert config.max_model_len == 2**31 - 1

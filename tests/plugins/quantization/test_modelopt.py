"""Model Optimizer's checkpoints, written and read back here by their published layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from through_triton import ThroughTriton

from jackfield.core.config import EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.loading.quantize import choose_method
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.quantized import LinearSpec
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.quantization import QuantizationKit
from jackfield.plugins.quantization.fp8 import Fp8Linear
from jackfield.plugins.quantization.modelopt import ModelOpt
from jackfield.plugins.quantization.nvfp4 import Nvfp4Linear

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8 = torch.float8_e4m3fn


class TestNvfp4(QuantizationKit):
    name = "modelopt"
    config = {"quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    mismatched = {
        "quant_algo": "INT4_AWQ", "group_size": 32, "ignore": "lm_head",
        "kv_cache_scheme": {"type": "int", "num_bits": 8},
    }  # fmt: skip
    ignore_field = "ignore"

    def quantize(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Two scales: the largest number of a group is 6, and the largest scale of groups 448."""
        groups = weight.unflatten(1, (-1, 16))
        largest = groups.abs().amax(2)
        whole = largest.max() / (6 * 448)
        scale = (largest / 6 / whole).to(FP8)
        step = (scale.float() * whole).clamp(min=1e-12)[..., None]
        number = (groups.abs()[..., None] / step[..., None] - NUMBERS).abs().argmin(-1)
        bits = (number + 8 * (groups < 0)).flatten(1).to(torch.uint8)
        signed = NUMBERS[number] * torch.where(groups < 0, -1.0, 1.0)
        stored = {
            "weight": bits[:, 0::2] | bits[:, 1::2] << 4,
            "weight_scale": scale,
            "weight_scale_2": whole,
            "input_scale": torch.tensor(0.01),
        }
        return stored, (signed * scale.float()[..., None] * whole).flatten(1)


class TestNvfp4ThroughTriton(ThroughTriton, TestNvfp4):
    """Groups are as narrow as the matrix unit."""

    exact = 5e-3 if torch.cuda.is_available() else 1e-4
    product_error = 0.06 if torch.cuda.is_available() else 1e-4


class TestFp8(QuantizationKit):
    name = "modelopt"
    config = {"quant_algo": "FP8", "ignore": ["lm_head"]}
    ignore_field = "ignore"
    rounding = 0.05

    def quantize(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        scale = weight.abs().max() / 448
        stored = (weight / scale).to(FP8)
        tensors = {"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
        return tensors, stored.float() * scale


def spec(name: str, *shards: str) -> LinearSpec:
    sources = {shard: f"{name}.{shard}" for shard in shards} or {"": name}
    return LinearSpec(
        prefix=name, role="linear", in_features=64, shards=dict.fromkeys(sources, 32),
        sources=sources, gated=False, device=torch.device("cpu"), dtype=torch.float32,
        operations=Operations(),
    )  # fmt: skip


def mixed(**layers: Any) -> ModelOpt:
    return ModelOpt.from_config({
        "quant_algo": "MIXED_PRECISION", "ignore": ["model.layers.2*", "lm_head"],
        "kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False},
        "quantized_layers": {
            "model.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
            "model.layers.1.mixer.experts": {"quant_algo": "NVFP4", "group_size": 16},
            "model.layers.2.mixer.in_proj": {"quant_algo": "FP8"}, **layers,
        },
    })  # fmt: skip


def test_layers_of_one_model_are_stored_differently() -> None:
    method = mixed()
    assert (method.unit, method.kv_cache_dtype) == (16, "fp8_e4m3")
    fp8 = method.layer(spec("model.layers.0.mixer.in_proj"))
    assert isinstance(fp8, Fp8Linear) and fp8.static
    experts = spec("model.layers.1.mixer.experts.0", "up_proj", "down_proj")
    assert isinstance(method.layer(experts), Nvfp4Linear)
    for name in ("model.layers.0.mixer.out_proj", "model.layers.2.mixer.in_proj", "lm_head"):
        assert method.layer(spec(name)) is None


def test_parts_of_a_layer_are_stored_alike() -> None:
    method = mixed(**{"model.layers.3.q_proj": {"quant_algo": "FP8"}})
    with pytest.raises(ConfigError, match="are stored differently"):
        method.layer(spec("model.layers.3", "q_proj", "k_proj"))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A8"}}},
         "quantized_layers.a.quant_algo"),
        ({"quant_algo": None}, "quant_algo"),
        ({"quant_algo": "FP8", "kv_cache_scheme": {"type": "float", "num_bits": 4}},
         "kv_cache_scheme.num_bits"),
    ],
)  # fmt: skip
def test_other_layouts_are_refused_by_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelOpt.from_config(config)
    assert caught.value.param == f"quantization_config.{field}"


def test_rows_are_whole_groups() -> None:
    method = ModelOpt.from_config({"quant_algo": "nvfp4"})
    with pytest.raises(ConfigError, match="groups of 16 columns"):
        method.layer(dataclasses.replace(spec("model.layers.0.mlp.down_proj"), in_features=24))


def test_the_older_file_is_read_where_config_json_says_nothing(tmp_path: Path) -> None:
    plugins = load_plugins()
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def read() -> Any:
        options = EngineConfig(model=str(tmp_path), device="cpu")
        return resolve_model_config(options, plugins).quantization_config

    assert read() is None
    older = {
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
            "exclude_modules": ["lm_head", "model.layers.0.mlp*"],
        },
    }  # fmt: skip
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(older))
    found = read()
    assert found == {"quant_method": "modelopt", **older}
    method = ModelOpt.from_config(found)
    assert method.kv_cache_dtype == "fp8_e4m3"
    assert method.layer(spec("model.layers.0.mlp.down_proj")) is None
    assert isinstance(method.layer(spec("model.layers.0.self_attn.o_proj")), Nvfp4Linear)
    own = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": own}))
    assert read() == own


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("exclude_modules", ["re:("], "is no regular expression"),
        ("exclude_modules", "lm_head", "must be a list of names"),
        ("quant_algo", 4, "must be FP8 or"),
    ],
)
def test_an_error_names_the_file_that_says_it(
    field: str, value: Any, message: str, tmp_path: Path
) -> None:
    """config.json has no such field."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    older = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": [], field: value}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(older))
    options, plugins = EngineConfig(model=str(tmp_path), device="cpu"), load_plugins()
    found = resolve_model_config(options, plugins)
    with pytest.raises(ConfigError, match=rf"hf_quant_config\.json: .*\.{field}: .*{message}"):
        choose_method(plugins, options, found, torch.device("cpu"))

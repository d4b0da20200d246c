"""Putting quantized layers in place: biases, sources, what stays, and an outsider's method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jackfield import EngineConfig, hookimpl
from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.loading.build import build_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.loading.quantization_config import ConfigReader, name_matches
from jackfield.core.loading.quantize import quantized_layers
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.quantized import LinearSpec, QuantizedLinear, TensorSpec
from jackfield.core.registry import load_plugins

from helpers import make_checkpoint


class SignLayer(QuantizedLinear):
    """The sign of each weight times a number a shard: the smallest method there is."""

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec((out_features, self.spec.in_features))}

    def process(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        parts = [shards[name]["weight"] for name in self.spec.shards]
        self.signs = self.keep("signs", torch.cat([part.sign().to(torch.int8) for part in parts]))
        scales = [part.abs().mean().expand(part.shape[0]) for part in parts]
        self.scales = self.keep("scales", torch.cat(scales))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.signs.to(x.dtype).t()) * self.scales


class Sign:
    name = "sign"

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return "it is too coarse for half types" if dtype == torch.float16 else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Sign:
        ConfigReader(config).flag("coarse", True)
        return cls()

    def layer(self, spec: LinearSpec) -> QuantizedLinear | None:
        return SignLayer(spec) if spec.role == "linear" else None


class Plugin:
    @hookimpl
    def register_quantization(self, registry: Any) -> None:
        registry.add("sign", Sign)


def load(folder: Path, **options: Any) -> Any:
    settings = {"device": "cpu", "dtype": "float32", "quantization": "sign", **options}
    config = EngineConfig(model=str(folder), **settings)
    return build_model(
        load_plugins(extra=[Plugin()]), config, resolve_model_config(config),
        torch.device("cpu"), Operations(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2: biases on queries, keys and values, and tied embeddings."""
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))


def test_an_outsiders_method_takes_layers_over(folder: Path) -> None:
    model, tensors = load(folder), load_file(folder / "model.safetensors")
    layer = quantized_layers(model)["model.layers.1.self_attn.qkv_proj"]
    assert layer.spec.shards == {"q": 64, "k": 32, "v": 32}
    assert layer.spec.sources["k"] == "model.layers.1.self_attn.k_proj"
    names = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    weights = [tensors[f"{name}.weight"] for name in names]
    dense = torch.cat([weight.sign() * weight.abs().mean() for weight in weights])
    bias = torch.cat([tensors[f"{name}.bias"] for name in names])
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), x @ dense.t() + bias)
    residual = torch.randn(3, 128)
    torch.testing.assert_close(layer(x, residual=residual), x @ dense.t() + bias + residual)
    gate = quantized_layers(model)["model.layers.1.mlp.gate_up_proj"]
    assert gate.spec.gated and gate(x).shape == (3, 96)
    embedding = model.get_parameter("model.embed_tokens.weight")
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"]), (
        "embeddings were left alone"
    )
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_weights_of_unquantized_models_are_made_at_once(folder: Path) -> None:
    assert not quantized_layers(load(folder, quantization=None))


def test_a_method_that_cannot_run_here_says_why(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization: 'sign'.*too coarse") as caught:
        load(folder, dtype="float16")
    assert caught.value.param == "quantization"


def test_an_unknown_method_is_named_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'sgin'.*did you mean 'sign'"):
        load(folder, quantization="sgin")


def test_a_bias_of_zeros_is_dropped_and_any_other_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(64)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert quantized_layers(load(tmp_path))["model.layers.0.self_attn.o_proj"].bias is None
    tensors["model.layers.0.self_attn.o_proj.bias"][3] = 1.0
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoadError, match=r"o_proj\.bias"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("self_attn.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("re:.*layers\\.[01]\\.", "model.layers.1.mlp.up_proj", True),
        ("re:layers", "model.layers.1.mlp.up_proj", False),
    ],
)
def test_ignore_lists_mean_whole_parts_of_names(pattern: str, name: str, expected: bool) -> None:
    assert name_matches(name, pattern) is expected


@pytest.mark.parametrize(
    ("values", "read", "field"),
    [
        ({"bits": 5}, lambda r: r.choice("bits", (4, 8), 4), "bits"),
        ({"bits": True}, lambda r: r.choice("bits", (1, 8), 8), "bits"),
        ({"size": "8"}, lambda r: r.integer("size", 8), "size"),
        ({"size": 0}, lambda r: r.integer("size", 8), "size"),
        ({"list": "lm_head"}, lambda r: r.names("list"), "list"),
        ({"list": [1]}, lambda r: r.names("list"), "list"),
        ({"inner": 3}, lambda r: r.inner("inner"), "inner"),
        ({"inner": {"x": 2}}, lambda r: r.inner("inner").flag("x", True), "inner.x"),
    ],
)
def test_fields_of_the_wrong_kind_are_refused_by_name(
    values: dict[str, Any], read: Any, field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(ConfigReader(values))
    assert caught.value.param == f"quantization_config.{field}"

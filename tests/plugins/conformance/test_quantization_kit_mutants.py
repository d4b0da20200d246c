"""The kit of quantization methods notices planted bugs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from mutants import Mutant, mutant_tests, plugin_of, subclass

from jackfield.core.loading.quantization_config import ConfigReader, is_ignored
from jackfield.core.nn.quantized import PRODUCTS, LinearSpec, QuantizedLinear, TensorSpec
from jackfield.plugins.conformance.quantization import QuantizationKit


class Rows(QuantizedLinear):
    """Eight bits, with a scale for so many columns, as the checkpoint stores them."""

    group: int

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        size = self.spec.in_features
        return {
            "weight": TensorSpec((out_features, size), (torch.int8,)),
            "scale": TensorSpec((out_features, size // self.group), dummy=0.01),
        }

    def process(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        parts = [shards[name] for name in self.spec.shards]
        self.integers = self.keep("integers", torch.cat([part["weight"] for part in parts]))
        self.scale = self.keep("scale", torch.cat([part["scale"] for part in parts]))

    def whole(self, integers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return integers.float() * scale.float().repeat_interleave(self.group, dim=1)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.whole(self.integers, self.scale).to(x.dtype))

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return self.whole(self.integers[indices], self.scale[indices]).to(self.spec.dtype)


class Sound:
    """The method."""

    name = "subject"
    layers: type = Rows

    def __init__(self, group: int, ignored: tuple[str, ...]) -> None:
        self.group, self.ignored = group, ignored

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        read = ConfigReader(config)
        read.choice("bits", (8,), 8)
        return cls(read.integer("group_size", 32), read.names("ignore"))

    def layer(self, spec: LinearSpec) -> Any:
        if spec.role not in PRODUCTS or is_ignored(spec, self.ignored, "ignore"):
            return None
        layer = self.layers(spec)
        layer.group = self.group
        return layer


class Kit(QuantizationKit):
    name = "subject"
    plugin = plugin_of("quantization", "subject", Sound)
    config = {"bits": 8, "group_size": 32}
    mismatched = {"bits": 4, "group_size": "wide", "ignore": "lm_head"}
    ignore_field = "ignore"
    rounding = 0.01

    def quantize(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        wide = weight.unflatten(1, (-1, 32))
        scale = wide.abs().amax(-1) / 127
        scale[scale == 0] = 1.0
        integers = (wide / scale[:, :, None]).round()
        dense = (integers * scale[:, :, None]).flatten(1)
        return {"weight": integers.flatten(1).to(torch.int8), "scale": scale}, dense

    @pytest.fixture(scope="class", params=["Llama", "Qwen3Moe"])
    @classmethod
    def family(cls, request: pytest.FixtureRequest) -> str:
        return str(request.param)


def planted(**changes: Any) -> type:
    """The method with layers some of whose attributes are others."""
    return subclass(Sound, layers=subclass(Rows, **changes))


def no_bias(self: Any, x: torch.Tensor, *, norm: Any = None, residual: Any = None) -> torch.Tensor:
    out = self.product(x if norm is None else norm(x))
    out = self.spec.operations.silu_mul(out) if self.spec.gated else out
    return out if residual is None else residual + out


def wide_product(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.float() @ self.whole(self.integers, self.scale).t()


def first_scales(self: Any, shards: Any) -> None:
    Rows.process(self, shards)
    count = next(iter(self.spec.shards.values()))
    with torch.no_grad():
        self.scale[count:] = self.scale[:count].repeat(len(self.scale) // count + 1, 1)[
            : len(self.scale) - count
        ]


def shards_by_name(self: Any, shards: Any) -> None:
    Rows.process(self, dict(sorted(shards.items(), reverse=True)))
    order = sorted(self.spec.shards)
    self.integers = self.keep("integers", torch.cat([shards[name]["weight"] for name in order]))
    self.scale = self.keep("scale", torch.cat([shards[name]["scale"] for name in order]))


def no_residual(
    self: Any, x: torch.Tensor, *, norm: Any = None, residual: Any = None
) -> torch.Tensor:
    return QuantizedLinear.forward(self, x, norm=norm)


def no_norm(self: Any, x: torch.Tensor, *, norm: Any = None, residual: Any = None) -> torch.Tensor:
    return QuantizedLinear.forward(self, x, residual=residual)


def bare_linear(self: Any, x: torch.Tensor, *, norm: Any = None, residual: Any = None) -> Any:
    gated, spec = self.spec.gated, self.spec
    out = QuantizedLinear.forward(self, x, norm=norm, residual=residual)
    return out if not gated else out.abs() * 1.0 + 0 * spec.in_features


def group_from_shapes(self: Any, shards: Any) -> None:
    Rows.process(self, shards)
    self.group = self.spec.in_features // self.scale.shape[1]


def any_shape(self: Any, out_features: int) -> Any:
    specs = dict(Rows.tensors(self, out_features))
    return {**specs, "scale": TensorSpec(None, dummy=0.01)}


def optional_scale(self: Any, out_features: int) -> Any:
    specs = dict(Rows.tensors(self, out_features))
    shape = specs["scale"].shape
    return {**specs, "scale": TensorSpec(shape, optional=True, dummy=0.01)}


def or_ones(self: Any, shards: Any) -> None:
    Rows.process(self, {
        name: {"scale": torch.ones(len(part["weight"]), part["weight"].shape[1] // self.group),
               **part}
        for name, part in shards.items()
    })  # fmt: skip


def any_bits(cls: Any, config: Mapping[str, Any]) -> Any:
    read = ConfigReader(config)
    return cls(read.integer("group_size", 32), read.names("ignore"))


def ignores_nothing(cls: Any, config: Mapping[str, Any]) -> Any:
    method = Sound.from_config.__func__(cls, config)
    method.ignored = ()
    return method


def bare_errors(cls: Any, config: Mapping[str, Any]) -> Any:
    try:
        return Sound.from_config.__func__(cls, config)
    except Exception as error:
        raise ValueError(str(error)) from error


LAYERS = "test_layers_multiply_by_the_dequantised_weights"
BIASES, TYPE = "test_biases_are_added", "test_results_are_in_the_models_type"
NUMBERS = "test_every_number_of_the_config_counts"
AROUND = "test_norm_before_and_residual_after"
ENGINE = "test_engine_gives_the_dequantised_models_log_probabilities"
REFUSED = "test_mismatched_config_is_refused_by_the_fields_name"
NAMED = "test_missing_and_misshapen_tensors_are_named"
IGNORED = "test_ignored_layers_stay_as_they_are"
DUMMY = "test_dummy_weights_can_be_made"

MUTANTS = {
    "bias dropped": Mutant(planted(forward=no_bias), (BIASES, AROUND, ENGINE)),
    "float32 answers in a bfloat16 model": Mutant(planted(product=wide_product), (TYPE,)),
    "group_size from the shapes": Mutant(
        planted(process=group_from_shapes, tensors=any_shape), (NUMBERS, DUMMY)
    ),
    "the first shard's scales for all": Mutant(planted(process=first_scales), (LAYERS, ENGINE)),
    "shards in the order of names": Mutant(planted(process=shards_by_name), (LAYERS, ENGINE)),
    "no residual": Mutant(planted(forward=no_residual), (AROUND, ENGINE)),
    "no norm": Mutant(planted(forward=no_norm), (AROUND, ENGINE)),
    "an odd activation": Mutant(planted(forward=bare_linear), (BIASES, AROUND, ENGINE)),
    "scales may be missing": Mutant(planted(tensors=optional_scale, process=or_ones), (NAMED,)),
    "any bits": Mutant(subclass(Sound, from_config=classmethod(any_bits)), (REFUSED, NUMBERS)),
    "nothing is ignored": Mutant(
        subclass(Sound, from_config=classmethod(ignores_nothing)), (IGNORED,)
    ),
    "errors of another kind": Mutant(
        subclass(Sound, from_config=classmethod(bare_errors)), (REFUSED, NUMBERS)
    ),
}

TestMutants = mutant_tests(Kit, MUTANTS)

"""compressed-tensors checkpoints, written and dequantised by the format's own package."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from jackfield.core.errors import ConfigError
from jackfield.plugins.conformance.quantization import QuantizationKit
from jackfield.plugins.quantization.compressed_tensors import CompressedTensors

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam


def config_of(group: dict[str, Any], layout: str) -> dict[str, Any]:
    return {
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, **group}},
    }


def extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest of what shares a scale, shaped as the scale."""
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy in ("group", "tensor_group"):
        grouped = weight.unflatten(1, (-1, args.group_size))
        return grouped.amin(2), grouped.amax(2)
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, 128, columns, 128)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


class PackageKit(QuantizationKit):
    """The package packs and unpacks."""

    name = "compressed-tensors"
    ignore_field = "ignore"
    layout: ClassVar[str]

    def quantize(self, weight: torch.Tensor) -> Any:
        group = self.config["config_groups"]["group_0"]
        scheme = QuantizationScheme(**{**group, "format": None})
        low, high = extremes(weight, scheme.weights)
        scale, zero = calculate_qparams(low, high, scheme.weights)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(self.layout)
        stored = compressor.compress(state, scheme)
        dequantised = compressor.decompress(dict(stored), scheme)["weight"].float()
        if (group["input_activations"] or {}).get("dynamic") is False:
            stored["input_scale"] = torch.tensor([0.03])
        return stored, dequantised


FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT8 = {**FP8, "type": "int"}
NVFP4 = {**FP8, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
MXFP4 = {**FP8, "num_bits": 4, "strategy": "group", "group_size": 32}
TOKEN = {"num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}


class TestFp8Dynamic(PackageKit):
    layout = "float-quantized"
    config = config_of(
        {
            "weights": {**FP8, "strategy": "channel"},
            "input_activations": {**TOKEN, "type": "float"},
        },
        layout,
    )
    mismatched = {
        "quantization_status": "frozen",
        "format": "marlin-24",
        "config_groups": {},
        "sparsity_config": {"format": "sparse-24-bitmask"},
        "transform_config": {"config_groups": {"a": {}}},
        "ignore": "lm_head",
    }
    rounding = 0.04


class TestFp8Static(PackageKit):
    layout = "float-quantized"
    config = config_of(
        {
            "weights": {**FP8, "strategy": "tensor"},
            "input_activations": {**FP8, "strategy": "tensor"},
        },
        layout,
    )
    rounding = 0.04


class TestFp8Blocks(PackageKit):
    layout = "float-quantized"
    config = config_of(
        {
            "weights": {**FP8, "strategy": "block", "block_structure": [128, 128]},
            "input_activations": {**TOKEN, "type": "float", "strategy": "group", "group_size": 128},
        },
        layout,
    )
    rounding = 0.04
    inert = frozenset({"config_groups.group_0.input_activations.group_size"})
    """Inputs may be left as they are."""


class TestNvfp4(PackageKit):
    """The package's own numbers, which it multiplies by the scale of the tensor."""

    layout = "nvfp4-pack-quantized"
    config = config_of(
        {"weights": NVFP4, "input_activations": NVFP4 | {"dynamic": "local"}}, layout
    )
    inert = frozenset({
        f"config_groups.group_0.input_activations.{field}" for field in ("num_bits", "group_size")
    })  # fmt: skip
    """Inputs are left as they are."""

    def quantize(self, weight: torch.Tensor) -> Any:
        scheme = QuantizationScheme(targets=["Linear"], weights=NVFP4)
        whole = generate_gparam(weight.min(), weight.max())
        low, high = extremes(weight, scheme.weights)
        scale, _ = calculate_qparams(low, high, scheme.weights, global_scale=whole)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
        stored = BaseCompressor.get_value_from_registry(self.layout).compress(state, scheme)
        numbers = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, torch.float32)
        step = stored["weight_scale"].float().repeat_interleave(16, dim=1) / whole
        return stored, numbers * step


class TestMxfp4(PackageKit):
    """Numbers as in NVFP4, and scales that are powers of two, by their exponents."""

    layout = "mxfp4-pack-quantized"
    config = config_of({"weights": MXFP4, "input_activations": MXFP4 | {"dynamic": True}}, layout)
    inert = frozenset({
        f"config_groups.group_0.input_activations.{field}" for field in ("num_bits", "group_size")
    })  # fmt: skip

    def quantize(self, weight: torch.Tensor) -> Any:
        largest = weight.unflatten(1, (-1, 32)).abs().amax(2)
        exponent = (largest / 6.0).log2().ceil().clamp(-127, 127)
        step = (2.0**exponent).repeat_interleave(32, dim=1)
        packed = pack_fp4_to_uint8(nearest(weight / step))
        stored = {"weight_packed": packed, "weight_scale": (exponent + 127).to(torch.uint8)}
        return stored, unpack_fp4_from_uint8(packed, *weight.shape, torch.float32) * step


def nearest(x: torch.Tensor) -> torch.Tensor:
    """Round to what four bits hold."""
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([-positive, positive])
    return values[(x[..., None] - values).abs().argmin(-1)]


class TestInt8(PackageKit):
    layout = "int-quantized"
    config = config_of(
        {
            "weights": {**INT8, "strategy": "channel"},
            "input_activations": {**TOKEN, "type": "int"},
        },
        layout,
    )
    rounding = 0.02


class TestW4A16(PackageKit):
    layout = "pack-quantized"
    config = config_of(
        {"weights": {**INT8, "num_bits": 4, "strategy": "group", "group_size": 32}}, layout
    )


class TestW4A16Asymmetric(TestW4A16):
    config = config_of(
        {
            "weights": {
                **INT8, "num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False,
            }
        },
        "pack-quantized",
    )  # fmt: skip


class TestW8A16(TestW4A16):
    config = config_of({"weights": {**INT8, "strategy": "channel"}}, "pack-quantized")
    rounding = 0.02


class TestMixed(TestW4A16):
    """Attention in 4 bits, the MLP in fp8, by patterns; the head with them."""

    config = {
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ["re:.*layers\\.1\\.mlp.*"],
        "config_groups": {
            "group_0": {
                "targets": ["re:.*self_attn.*"], "format": "pack-quantized",
                "weights": {**INT8, "num_bits": 4, "strategy": "group", "group_size": 32},
                "input_activations": None,
            },
            "group_1": {
                "targets": ["Linear"], "format": "float-quantized",
                "weights": {**FP8, "strategy": "channel"},
                "input_activations": {**TOKEN, "type": "float"},
            },
        },
    }  # fmt: skip
    ignore_field = None
    of_attention: tuple[tuple[int, int], ...] = ((128, 128), (64, 128))

    def write(self, family: str, folder: Path) -> Any:
        if family == "Phi3":
            self.of_attention = ((128, 128), (256, 128))
        return super().write(family, folder)

    def is_quantized(self, layer: str) -> bool:
        return "layers.1.mlp" not in layer

    def quantize(self, weight: torch.Tensor) -> Any:
        """The kit asks layer by layer: shapes tell attention apart."""
        attention = weight.shape in self.of_attention
        group = "group_0" if attention else "group_1"
        inner = TestW4A16() if attention else TestFp8Dynamic()
        inner.config = {"config_groups": {"group_0": self.config["config_groups"][group]}}
        return inner.quantize(weight)


def test_a_cache_scheme_makes_the_cache_fp8(tmp_path: Path) -> None:
    import asyncio

    from jackfield import AsyncEngine

    kit = TestFp8Dynamic()
    kit.write("Llama", tmp_path)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    sizes = []

    async def start(**options: Any) -> None:
        config = kit.engine_config(tmp_path, num_gpu_blocks_override=10, **options)
        async with AsyncEngine(config) as engine:
            assert engine.info is not None
            sizes.append(engine.info.kv_cache_bytes)

    asyncio.run(start())
    kit.set_config(tmp_path, kv_cache_scheme=scheme)
    asyncio.run(start())
    asyncio.run(start(kv_cache_dtype="float32"))
    assert sizes == [sizes[0], sizes[0] // 4, sizes[0]]
    kit.set_config(tmp_path, kv_cache_scheme={**scheme, "num_bits": 4})
    with pytest.raises(ConfigError, match=r"kv_cache_scheme\.num_bits"):
        kit.build(tmp_path)


WRONG = {
    "weights.num_bits": ("weights", {**INT8, "num_bits": 3, "strategy": "channel"}),
    "weights.strategy": ("weights", {**FP8, "strategy": "tensor_group"}),
    "weights.symmetric": ("weights", {**FP8, "strategy": "channel", "symmetric": False}),
    "weights.block_structure": ("weights", {**FP8, "strategy": "block", "block_structure": 128}),
    "input_activations.num_bits": ("input_activations", {**TOKEN, "num_bits": 4}),
    "input_activations.type": ("input_activations", {**TOKEN, "type": "int"}),
    "targets": ("targets", ["re:("]),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_group_is_refused_by_the_fields_name(field: str) -> None:
    from jackfield.plugins.quantization.compressed_tensors import CompressedTensors

    changed, value = WRONG[field]
    group = TestFp8Dynamic.config["config_groups"]["group_0"]
    layout = "pack-quantized" if field == "weights.num_bits" else "float-quantized"
    extra = {"input_activations": None} if field == "weights.num_bits" else {}
    config = config_of({**group, **extra, changed: value}, layout)
    with pytest.raises(ConfigError) as caught:
        CompressedTensors.from_config(config)
    assert caught.value.param == f"quantization_config.config_groups.group_0.{field}"


def test_layers_are_divided_by_the_largest_unit_of_their_groups() -> None:
    """Ranks must not cut a scale's group of any of them."""
    groups = [
        {"targets": ["Linear"], "format": "pack-quantized",
         "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}},
        {"targets": ["re:.*down_proj"], "format": "float-quantized",
         "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
    ]  # fmt: skip
    for order in (groups, groups[::-1]):
        config = {
            "format": "mixed-precision",
            "config_groups": {f"group_{n}": group for n, group in enumerate(order)},
        }
        assert CompressedTensors.from_config(config).unit == 32

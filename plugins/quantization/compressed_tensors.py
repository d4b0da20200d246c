"""compressed-tensors checkpoints (llm-compressor's): schemes by groups of layers.

Each of `config_groups` names its layers (`targets`: module names, "re:" patterns, or the class
"Linear") and says how their weights and inputs are rounded. Supported are fp8 and int8 weights per
tensor, per channel and (fp8) per block of 128 x 128, with wide inputs or rounded ones per token or
statically; packed int4 and int8 weights, by group or channel; NVFP4 and MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ...core.errors import ConfigError, LoadError, listed
from ...core.loading.quantization_config import ConfigReader, is_ignored, name_matches
from ...core.nn.quantized import (
    Axis,
    LinearSpec,
    QuantizedLinear,
    QuantizedWeightLinear,
    TensorSpec,
)
from ...core.nn.quantized_weight import WORD_BITS, QuantizedWeight
from .fp8 import BLOCK, Fp8Linear
from .grouped import Grouped, join, own_groups, unpack_along
from .int8 import Int8Linear
from .mxfp4 import GROUP as MXFP4_GROUP
from .mxfp4 import PackedMxfp4Linear
from .nvfp4 import GROUP, Nvfp4Linear, Nvfp4Tensors
from .rtn import read_group_size

CLASS = "Linear"
FORMATS = (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)  # fmt: skip
NVFP4 = Nvfp4Tensors("weight_packed", "weight_global_scale", "input_global_scale", inverse=True)


@dataclass(frozen=True)
class Scheme:
    """How a group's layers are stored."""

    targets: tuple[str, ...]
    kind: Literal["fp8", "int8", "packed", "nvfp4", "mxfp4"]
    bits: int
    group_size: int
    """Of packed weights; -1: the whole row."""
    symmetric: bool
    blocks: bool
    inputs: Literal["wide", "dynamic", "static"]
    sorted: bool = False
    """Whether packed columns were sorted, with the order in g_idx."""

    @property
    def unit(self) -> int:
        """Features stored together."""
        if self.kind in ("nvfp4", "mxfp4"):
            return self.group_size
        if self.kind == "packed":
            return max(self.group_size, WORD_BITS // self.bits)
        return BLOCK if self.blocks else 1


class CompressedTensors:
    """See the package's documentation for `quantization_config`."""

    name: ClassVar[str] = "compressed-tensors"

    def __init__(
        self, schemes: list[Scheme], ignored: tuple[str, ...], kv_cache_dtype: str | None = None
    ) -> None:
        self.schemes = schemes
        self.ignored = ignored
        self.kv_cache_dtype = kv_cache_dtype
        self.unit = max((scheme.unit for scheme in schemes), default=1)

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CompressedTensors:
        read = ConfigReader(config)
        read.choice("quantization_status", ("compressed",), "compressed")
        layout = read.choice("format", (*FORMATS, "mixed-precision", "dense"), None)
        sparsity = read.inner("sparsity_config")
        if sparsity is not None and sparsity.values:
            sparsity.choice("format", ("dense",), None)
        if read.values.get("transform_config"):
            raise read.refuse("transform_config", "empty: transforms are not supported")
        groups = read.inner("config_groups")
        if groups is None or not groups.values:
            raise read.refuse("config_groups", "an object with at least one group")
        schemes = [_scheme(group, layout) for group in _inner(groups)]
        cache = read.inner("kv_cache_scheme")
        if cache is not None:
            cache.choice("type", ("float",), None)
            cache.choice("num_bits", (8,), None)
            cache.choice("strategy", ("tensor",), "tensor")
        return cls(
            [scheme for scheme in schemes if scheme is not None],
            read.names("ignore"),
            None if cache is None else "fp8_e4m3",
        )

    def layer(self, spec: LinearSpec) -> QuantizedLinear | None:
        """Quantize by the first group that names the layer."""
        if spec.role == "embedding" or is_ignored(spec, self.ignored, "ignore"):
            return None
        schemes = {self._find(source) for source in spec.sources.values()}
        if len(schemes) > 1:
            raise ConfigError(
                f"quantization_config.config_groups: {listed(spec.sources.values(), 4)} are in "
                "different groups, and are computed as one layer",
                param="quantization_config.config_groups",
            )
        (scheme,) = schemes
        if scheme is None:
            return None
        static, wide = scheme.inputs == "static", scheme.inputs == "wide"
        if scheme.kind == "fp8":
            return Fp8Linear(spec, static=static, blocks=scheme.blocks, wide=wide, rounds=False)
        if scheme.kind == "int8":
            return Int8Linear(spec, static=static, wide=wide, rounds=False)
        if scheme.kind == "nvfp4":
            return Nvfp4Linear(spec, NVFP4)
        if scheme.kind == "mxfp4":
            return PackedMxfp4Linear(spec)
        return PackQuantizedLinear(spec, scheme)

    def _find(self, source: str) -> Scheme | None:
        """Find a layer's scheme, by name first, then by class."""
        for scheme in self.schemes:
            if any(name_matches(source, target) for target in scheme.targets if target != CLASS):
                return scheme
        return next((scheme for scheme in self.schemes if CLASS in scheme.targets), None)


def _inner(groups: ConfigReader) -> list[ConfigReader]:
    return [inner for name in groups.values if (inner := groups.inner(name)) is not None]


def _scheme(group: ConfigReader, layout: str | None) -> Scheme | None:
    """Return the scheme of a group; None: its weights are not rounded. Raises ConfigError with the
    field's name.
    """
    weights, inputs = group.inner("weights"), group.inner("input_activations")
    if weights is None:
        return None
    layout = group.choice("format", FORMATS, layout)
    if layout == "nvfp4-pack-quantized":
        return _floats_of_4(group, weights, "nvfp4", "tensor_group", GROUP)
    if layout == "mxfp4-pack-quantized":
        return _floats_of_4(group, weights, "mxfp4", "group", MXFP4_GROUP)
    kind: Literal["fp8", "int8", "packed"]
    if weights.choice("type", ("int", "float"), "int") == "float":
        kind = "fp8"
    else:
        kind = "packed" if layout == "pack-quantized" or inputs is None else "int8"
    if layout in ("int-quantized", "naive-quantized") and kind == "packed":
        kind = "int8"
    if (layout == "float-quantized") != (kind == "fp8") and layout in FORMATS[:2]:
        raise weights.refuse("type", f"what format {layout!r} holds")
    strategies = {
        "fp8": ("tensor", "channel", "block"),
        "int8": ("tensor", "channel"),
        "packed": ("group", "channel"),
    }[kind]
    strategy = weights.choice("strategy", strategies, None)
    if strategy is None:
        raise weights.refuse("strategy", " or ".join(strategies))
    bits = weights.choice("num_bits", (4, 8) if kind == "packed" else (8,), None)
    if bits is None:
        raise weights.refuse("num_bits", "4 or 8" if kind == "packed" else "8")
    symmetric = weights.flag("symmetric", True)
    if not symmetric and kind != "packed":
        raise weights.refuse("symmetric", f"true for {kind} weights")
    if strategy == "block" and weights.values.get("block_structure") != [BLOCK, BLOCK]:
        raise weights.refuse("block_structure", f"[{BLOCK}, {BLOCK}]")
    return Scheme(
        targets=group.names("targets"),
        kind=kind,
        bits=bits,
        group_size=read_group_size(weights, 128) if strategy == "group" else -1,
        symmetric=symmetric,
        blocks=strategy == "block",
        inputs=_inputs(inputs, kind, weights),
        sorted=weights.values.get("actorder") in (True, "group"),
    )


def _floats_of_4(
    group: ConfigReader,
    weights: ConfigReader,
    kind: Literal["nvfp4", "mxfp4"],
    strategy: str,
    size: int,
) -> Scheme:
    """Return the scheme of 4-bit floats, with wide inputs."""
    for field, served in (
        ("type", "float"), ("num_bits", 4), ("strategy", strategy), ("group_size", size),
    ):  # fmt: skip
        weights.choice(field, (served,), served)
    return Scheme(group.names("targets"), kind, 4, size, True, False, "wide")


def _inputs(
    inputs: ConfigReader | None, kind: str, weights: ConfigReader
) -> Literal["wide", "dynamic", "static"]:
    if inputs is None:
        return "wide"
    if kind == "packed":
        raise inputs.refuse("num_bits", "absent with packed weights: inputs stay wide")
    inputs.choice("num_bits", (8,), 8)
    inputs.choice("type", ("float" if kind == "fp8" else "int",), weights.values.get("type"))
    if inputs.flag("dynamic", False):
        return "dynamic"
    inputs.choice("strategy", ("tensor",), "tensor")
    return "static"


class PackQuantizedLinear(QuantizedWeightLinear):
    def __init__(self, spec: LinearSpec, scheme: Scheme) -> None:
        super().__init__(spec)
        self.scheme = scheme
        self.group_size = spec.in_features if scheme.group_size == -1 else scheme.group_size
        if spec.in_features % (WORD_BITS // scheme.bits):
            raise ConfigError(
                f"quantization_config.config_groups: {spec.in_features} columns of {spec.prefix} "
                f"do not fill words of {scheme.bits}-bit numbers",
                param="quantization_config.config_groups",
            )

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        size, parts = self.spec.in_features, WORD_BITS // self.scheme.bits
        groups = -(-size // self.group_size)
        by_group: Axis | None = None if self.scheme.group_size == -1 else ("in", self.group_size)
        step = 2.0 / (1 << self.scheme.bits) * (3.0 / size) ** 0.5
        specs = {
            "weight_packed": TensorSpec(
                (out_features, size // parts), (torch.int32,), axes=(("out", 1), ("in", parts))
            ),
            "weight_scale": TensorSpec(
                (out_features, groups), dummy=step, axes=(("out", 1), by_group)
            ),
            "weight_shape": TensorSpec((2,), (torch.int64, torch.int32), optional=True, axes=()),
            "weight_g_idx": TensorSpec(
                (size,), (torch.int32, torch.int64), optional=True,
                axes=(("in", 0 if self.scheme.sorted else 1),),
            ),
        }  # fmt: skip
        if not self.scheme.symmetric:
            specs["weight_zero_point"] = TensorSpec(
                (-(-out_features // parts), groups), (torch.int32,),
                axes=(("out", parts), by_group),
            )  # fmt: skip
        return specs

    def pack(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> QuantizedWeight:
        parts = []
        for shard, rows in self.spec.shards.items():
            shard_tensors = shards[shard]
            shape = shard_tensors.get("weight_shape")
            whole = self.sharding is None
            if whole and shape is not None and shape.tolist() != [rows, self.spec.in_features]:
                raise LoadError(
                    f"weight_shape of {self.spec.sources[shard]} is {shape.tolist()}, not "
                    f"{[rows, self.spec.in_features]}"
                )
            zeros = None
            if not self.scheme.symmetric:
                zeros = unpack_along(shard_tensors["weight_zero_point"], self.scheme.bits, 0)[
                    :rows
                ].t()
            values = unpack_along(shard_tensors["weight_packed"], self.scheme.bits, 1)
            scales = shard_tensors["weight_scale"].t()
            groups = own_groups(shard_tensors.get("weight_g_idx"), self.sharding)
            parts.append(Grouped(values, scales, zeros, groups))
        return join(parts, self.scheme.bits, self.group_size)

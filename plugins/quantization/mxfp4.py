"""MXFP4: experts in 4-bit floats (e2m1), 32 of which share an e8m0 scale, 2 ** (byte - 127).

Source: OCP Microscaling Formats (MX) Specification 1.0; the tensors' names and order are those of
GPT-OSS's published checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...core.errors import ConfigError, LoadError
from ...core.loading.quantization_config import ConfigReader, is_ignored
from ...core.nn.quantized import Axis, LinearSpec, QuantizedWeightLinear, TensorSpec
from ...core.nn.quantized_weight import QuantizedWeight
from .e2m1 import pack_floats

GROUP = 32
"""Columns that share a scale."""
SKIPPED = "modules_to_not_convert"


class Mxfp4:
    """`quantization_config` fields: modules_to_not_convert (names, or with * for a dotted part).

    Only experts are taken; everything else is stored as it is.
    """

    name: ClassVar[str] = "mxfp4"
    unit: ClassVar[int] = GROUP

    def __init__(self, ignored: tuple[str, ...]) -> None:
        self.ignored = ignored

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Mxfp4:
        read = ConfigReader(config)
        read.choice("bits", (4,), 4)
        read.choice("group_size", (GROUP,), GROUP)
        names = read.names(SKIPPED)
        return cls(tuple(_pattern(name) if "*" in name else name for name in names))

    def layer(self, spec: LinearSpec) -> Mxfp4Linear | None:
        """Raises ConfigError if rows are not whole groups."""
        if spec.role != "experts" or is_ignored(spec, self.ignored, SKIPPED):
            return None
        if spec.in_features % GROUP:
            raise ConfigError(
                f"quantization_config.quant_method: mxfp4 has groups of {GROUP} columns, and "
                f"{spec.prefix} has {spec.in_features}",
                param="quantization_config.quant_method",
            )
        return Mxfp4Linear(spec)


def _pattern(name: str) -> str:
    """Convert a name, in which * matches within a dotted part, to a regular expression."""
    return "re:" + re.escape(name).replace(r"\*", r"[^.]*") + r"(\.|$)"


class Mxfp4Linear(QuantizedWeightLinear):
    """blocks: [out_features, groups, 16] uint8; scales: [out_features, groups] uint8."""

    numbers: ClassVar[str] = "blocks"
    scales: ClassVar[str] = "scales"

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        groups = self.spec.in_features // GROUP
        axes: tuple[Axis | None, ...] = (("out", 1), ("in", GROUP))
        return {
            "blocks": TensorSpec((out_features, groups, GROUP // 2), (torch.uint8,), axes=axes),
            "scales": TensorSpec((out_features, groups), (torch.uint8,), dummy=120, axes=axes),
        }

    def pack(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> QuantizedWeight:
        """Copy parts of a shard at a time: they are most of a model."""
        spec = self.spec
        size, total = spec.in_features, spec.out_features
        scale = torch.empty(size // GROUP, total, dtype=torch.bfloat16, device=spec.device)
        start = 0
        for shard, rows in spec.shards.items():
            place = slice(start, start + rows)
            scale[:, place] = _powers(shards[shard][self.scales].to(spec.device)).t()
            start += rows
        if not scale.isfinite().all():
            raise LoadError(f"{self.scales}: 255 among them, which stands for no number")
        numbers = [shards[shard][self.numbers].flatten(1) for shard in spec.shards]
        return pack_floats(spec.prefix, numbers, scale, GROUP)


class PackedMxfp4Linear(Mxfp4Linear):
    """weight_packed: [out_features, in_features / 2] uint8; weight_scale: [out_features, groups]
    uint8, in compressed-tensors' names.
    """

    numbers = "weight_packed"
    scales = "weight_scale"

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec)
        if spec.in_features % GROUP:
            raise ConfigError(
                f"quantization_config: MXFP4 has groups of {GROUP} columns, and {spec.prefix} has "
                f"{spec.in_features}",
                param="quantization_config",
            )

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        size = self.spec.in_features
        return {
            self.numbers: TensorSpec(
                (out_features, size // 2), (torch.uint8,), axes=(("out", 1), ("in", 2))
            ),
            self.scales: TensorSpec(
                (out_features, size // GROUP), (torch.uint8,), dummy=120,
                axes=(("out", 1), ("in", GROUP)),
            ),
        }  # fmt: skip


def _powers(scales: torch.Tensor) -> torch.Tensor:
    """uint8 → 2 ** (scales - 127), bfloat16; 255 → infinity."""
    wide = scales.int()
    # The exponent bits of a float32; 2 ** -127 is subnormal.
    return torch.where(wide == 0, 1 << 22, wide << 23).view(torch.float32).to(torch.bfloat16)

"""NVFP4: e2m1 numbers, 16 of which share an e4m3 scale, with a float32 scale per tensor.

Inputs stay wide: no supported device multiplies 4-bit floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ...core.errors import ConfigError, LoadError
from ...core.nn.quantized import Axis, LinearSpec, QuantizedWeightLinear, TensorSpec
from ...core.nn.quantized_weight import QuantizedWeight
from .e2m1 import pack_floats

GROUP = 16
"""Columns that share a scale."""


class Nvfp4Tensors(NamedTuple):
    """A tool's names of a layer's tensors, besides weight_scale."""

    numbers: str
    whole: str
    """The tensor's scale."""
    inputs: str
    """The inputs' scale, which is unused."""
    inverse: bool = False
    """Whether the tensor's scale is a divisor."""


class Nvfp4Linear(QuantizedWeightLinear):
    """numbers: [out_features, in_features / 2] uint8; weight_scale: [out_features, groups] e4m3."""

    def __init__(self, spec: LinearSpec, names: Nvfp4Tensors) -> None:
        super().__init__(spec)
        self.names = names
        if spec.in_features % GROUP:
            raise ConfigError(
                f"quantization_config: NVFP4 has groups of {GROUP} columns, and {spec.prefix} has "
                f"{spec.in_features}",
                param="quantization_config",
            )

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        size = self.spec.in_features
        axes: tuple[Axis | None, ...] = (("out", 1), ("in", GROUP))
        return {
            self.names.numbers: TensorSpec(
                (out_features, size // 2), (torch.uint8,), axes=(("out", 1), ("in", 2))
            ),
            "weight_scale": TensorSpec(
                (out_features, size // GROUP), (torch.float8_e4m3fn,), dummy=1.0, axes=axes
            ),
            self.names.whole: TensorSpec(
                (), dummy=2.0**7 if self.names.inverse else 2.0**-7, axes=()
            ),
            self.names.inputs: TensorSpec((), optional=True, axes=()),
        }

    def pack(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> QuantizedWeight:
        """Copy parts of a shard at a time: they are most of a model."""
        spec = self.spec
        size, total = spec.in_features, spec.out_features
        scale = torch.empty(size // GROUP, total, dtype=torch.float32, device=spec.device)
        start = 0
        for shard, rows in spec.shards.items():
            place = slice(start, start + rows)
            whole = shards[shard][self.names.whole].to(spec.device).float()
            whole = 1 / whole if self.names.inverse else whole
            scale[:, place] = shards[shard]["weight_scale"].to(spec.device).float().t() * whole
            start += rows
        if not scale.isfinite().all():
            raise LoadError(
                f"weight_scale, {self.names.whole}: there is one that is no finite number"
            )
        numbers = [shards[shard][self.names.numbers] for shard in spec.shards]
        return pack_floats(spec.prefix, numbers, scale, GROUP)

"""MXINT8: blocks of 32 eight-bit integers with a shared power of two.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from jackfield.core.loading.quantization_config import ConfigReader, is_ignored
from jackfield.core.nn.quantized import LinearSpec, QuantizedLinear, TensorSpec

BLOCK = 32
FRACTION_BITS = 6
"""An element is its integer times 2 ** -FRACTION_BITS."""
SKIPPED = "modules_to_not_convert"


class MxInt8:
    """With a `quantization_config`, layers are stored in the format; without one, plain weights
    are rounded as they load.
    """

    name: ClassVar[str] = "mxint8"

    def __init__(self, *, stored: bool, ignored: tuple[str, ...] = ()) -> None:
        self.stored = stored
        self.ignored = ignored

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Everywhere: it is plain torch."""
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MxInt8:
        """Fields: block_size (32, nothing else is MX), modules_to_not_convert.

        Raises ConfigError with the field's name.
        """
        read = ConfigReader(config)
        read.choice("block_size", (BLOCK,), BLOCK)
        return cls(stored=bool(config), ignored=read.names(SKIPPED))

    def layer(self, spec: LinearSpec) -> MxInt8Linear | None:
        """Products; the embedding and the head stay as they are."""
        if spec.role not in ("linear", "experts") or spec.in_features % BLOCK:
            return None
        if is_ignored(spec, self.ignored, SKIPPED):
            return None
        return MxInt8Linear(spec, self.stored)


class MxInt8Linear(QuantizedLinear):
    """Keeps integers and scales; the weight is whole only while a product is made."""

    integers: torch.Tensor
    """[out_features, in_features] int8"""
    scales: torch.Tensor
    """[out_features, in_features / BLOCK] float8_e8m0fnu"""

    def __init__(self, spec: LinearSpec, stored: bool) -> None:
        super().__init__(spec)
        self.stored = stored

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        """The format's two, or the plain weight."""
        size = self.spec.in_features
        if not self.stored:
            return {"weight": TensorSpec((out_features, size))}
        return {
            "weight": TensorSpec((out_features, size), (torch.int8,)),
            "weight_scale": TensorSpec(
                (out_features, size // BLOCK), (torch.float8_e8m0fnu,), dummy=2.0**-FRACTION_BITS
            ),
        }

    def process(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Join the shards, rounded where they are not yet."""
        parts = [shards[name] for name in self.spec.shards]
        if self.stored:
            pairs = [(part["weight"], part["weight_scale"]) for part in parts]
        else:
            pairs = [round_to_blocks(part["weight"]) for part in parts]
        rows = [integers for integers, _ in pairs]
        # Concatenation is not written for every dtype: a scale is a byte.
        scales = [scale.view(torch.uint8) for _, scale in pairs]
        self.integers = self.keep("integers", torch.cat(rows))
        self.scales = self.keep("scales", torch.cat(scales).view(torch.float8_e8m0fnu))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in_features] → [num_tokens, out_features]"""
        return F.linear(x, whole(self.integers, self.scales).to(x.dtype))

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Of a mixture's experts: [num_rows] → [num_rows, in_features]"""
        # Nor is indexing: a scale is a byte.
        scales = self.scales.view(torch.uint8)[indices].view(torch.float8_e8m0fnu)
        return whole(self.integers[indices], scales).to(self.spec.dtype)


def round_to_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] → (integers, scales), as the specification converts a vector."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    # frexp gives a mantissa from 0.5 up, the specification's exponent is for one from 1 up.
    exponent = torch.frexp(largest).exponent - 1
    exponent = torch.where(largest == 0, 0, exponent).clamp(-127, 127)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    integers = (blocks / scale * 2**FRACTION_BITS).round().clamp(-127, 127)
    return integers.to(torch.int8).flatten(1), scale.squeeze(-1).to(torch.float8_e8m0fnu)


def whole(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[rows, columns] float32"""
    blocks = integers.float().unflatten(1, (-1, BLOCK)) * 2.0**-FRACTION_BITS
    return (blocks * scales.float()[..., None]).flatten(1)

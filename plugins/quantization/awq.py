"""AWQ checkpoints: 4 bits in groups of columns, packed along rows, interleaved.

Layout (as AutoAWQ's "gemm" version writes it): `qweight` [K, N / 8], `qzeros` [G, N / 8], `scales`
[G, N]. The eight rows of a word lie in the order 0, 2, 4, 6, 1, 3, 5, 7 from the low bits up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...core.errors import ConfigError
from ...core.loading.quantization_config import ConfigReader, is_ignored
from ...core.nn.quantized import PRODUCTS, Axis, LinearSpec, QuantizedWeightLinear, TensorSpec
from ...core.nn.quantized_weight import QuantizedWeight
from .grouped import Grouped, join, unpack_along
from .rtn import read_group_size

BITS = 4
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of rows 0 to 7."""


class Awq:
    """`quantization_config` fields: bits or w_bit (4), group_size or q_group_size, zero_point,
    version ("gemm"), modules_to_not_convert.
    """

    name: ClassVar[str] = "awq"

    def __init__(self, group_size: int, zeros: bool, ignored: tuple[str, ...]) -> None:
        self.group_size = group_size
        self.unit = max(group_size, len(PLACES))
        self.zeros = zeros
        self.ignored = ignored

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Awq:
        read = ConfigReader(config)
        field = "w_bit" if "w_bit" in config else "bits"
        if read.choice(field, (BITS,), None) is None:
            raise read.refuse(field, "4")
        version = read.values.get("version")
        if not isinstance(version or "gemm", str) or str(version or "gemm").lower() != "gemm":
            raise read.refuse("version", "'gemm'")
        size = "q_group_size" if "q_group_size" in config else "group_size"
        return cls(
            group_size=read_group_size(read, 128, size),
            zeros=read.flag("zero_point", True),
            ignored=read.names("modules_to_not_convert"),
        )

    def layer(self, spec: LinearSpec) -> AwqLinear | None:
        if spec.role not in PRODUCTS or is_ignored(spec, self.ignored, "modules_to_not_convert"):
            return None
        return AwqLinear(spec, self.group_size, self.zeros)


class AwqLinear(QuantizedWeightLinear):
    def __init__(self, spec: LinearSpec, group_size: int, zeros: bool) -> None:
        super().__init__(spec)
        self.one_group = group_size == -1
        self.group_size = spec.in_features if self.one_group else group_size
        self.zeros = zeros
        if spec.in_features % 8 or any(rows % 8 for rows in spec.shards.values()):
            raise ConfigError(
                f"quantization_config.bits: the rows of {spec.prefix} do not fill words of 8",
                param="quantization_config.bits",
            )

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        size = self.spec.in_features
        groups = -(-size // self.group_size)
        step = 2.0 / (1 << BITS) * (3.0 / size) ** 0.5
        by_group: Axis | None = None if self.one_group else ("in", self.group_size)
        return {
            "qweight": TensorSpec(
                (size, out_features // 8), (torch.int32,), axes=(("in", 1), ("out", 8))
            ),
            "qzeros": TensorSpec(
                (groups, out_features // 8), (torch.int32,), optional=not self.zeros,
                axes=(by_group, ("out", 8)),
            ),
            "scales": TensorSpec(
                (groups, out_features), dummy=step, axes=(by_group, ("out", 1))
            ),
        }  # fmt: skip

    def pack(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> QuantizedWeight:
        parts = []
        for shard in self.spec.shards:
            shard_tensors = shards[shard]
            zeros = _rows(shard_tensors["qzeros"]) if self.zeros else None
            parts.append(
                Grouped(_rows(shard_tensors["qweight"]).t(), shard_tensors["scales"], zeros)
            )
        return join(parts, BITS, self.group_size)


def _rows(packed: torch.Tensor) -> torch.Tensor:
    """[M, N / 8] words → [M, N] numbers, in order."""
    numbers = unpack_along(packed, BITS, 1).view(packed.shape[0], -1, 8)
    return numbers[:, :, list(PLACES)].flatten(1)

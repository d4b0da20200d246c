"""Round to nearest, 4 or 8 bits, at load: no calibration, weights only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...core.loading.quantization_config import ConfigReader, is_ignored
from ...core.nn.quantized import PRODUCTS, LinearSpec, QuantizedWeightLinear, TensorSpec
from ...core.nn.quantized_weight import WORD_BITS, QuantizedWeight, round_to_words


class Rtn:
    """`quantization_config` fields (give them with hf_overrides): bits (4 or 8; default 8),
    group_size (columns that share a scale, default 128; -1: the whole row), lm_head and embeddings
    (true: these, too), modules_to_not_convert.
    """

    name: ClassVar[str] = "rtn"

    def __init__(
        self, *, bits: int = 8, group_size: int = 128, head: bool = False,
        embeddings: bool = False, ignored: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.bits = bits
        self.group_size = group_size
        self.roles = {*PRODUCTS, *["head"] * head, *["embedding"] * embeddings}
        self.ignored = ignored

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Rtn:
        read = ConfigReader(config)
        return cls(
            bits=read.choice("bits", (4, 8), 8),
            group_size=read_group_size(read, 128),
            head=read.flag("lm_head", False),
            embeddings=read.flag("embeddings", False),
            ignored=read.names("modules_to_not_convert"),
        )

    def layer(self, spec: LinearSpec) -> RtnLinear | None:
        """Quantize every product whose rows fill whole words; head and embeddings if requested."""
        if spec.role not in self.roles or spec.in_features % (WORD_BITS // self.bits):
            return None
        if is_ignored(spec, self.ignored, "modules_to_not_convert"):
            return None
        return RtnLinear(spec, self.bits, self.group_size)


def read_group_size(read: ConfigReader, default: int, field: str = "group_size") -> int:
    """-1 (the whole row) or a multiple of 8. Raises ConfigError."""
    size = read.integer(field, default, least=-1)
    if size != -1 and (size < 8 or size % 8):
        raise read.refuse(field, "-1 or a multiple of 8")
    return size


class RtnLinear(QuantizedWeightLinear):
    def __init__(self, spec: LinearSpec, bits: int, group_size: int) -> None:
        super().__init__(spec)
        self.bits = bits
        self.group_size = spec.in_features if group_size == -1 else group_size

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        """The plain weight; each rank rounds its part."""
        size = self.spec.in_features
        return {"weight": TensorSpec((out_features, size), axes=(("out", 1), ("in", 1)))}

    def pack(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> QuantizedWeight:
        group = min(self.group_size, self.spec.in_features)
        parts = [
            round_to_words(shards[shard]["weight"].to(self.spec.dtype), self.bits, group)
            for shard in self.spec.shards
        ]
        return QuantizedWeight(
            values=torch.cat([words for words, _ in parts]),
            scale=torch.cat([scale for _, scale in parts], dim=1).contiguous(),
            group_size=group,
            bits=self.bits,
        )

"""int8 weights and activations: one scale per row of the weight, one per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...core.errors import LoadError
from ...core.loading.quantization_config import ConfigReader, is_ignored
from ...core.nn.quantized import PRODUCTS, LinearSpec, QuantizedWeightLinear, TensorSpec
from ...core.nn.quantized_weight import QuantizedWeight, round_to_int8


class Int8:
    """Rounds a plain checkpoint as it loads; one that holds int8 with its scales is taken as it is.

    `quantization_config` fields: modules_to_not_convert, lm_head (true: the head, too).
    """

    name: ClassVar[str] = "int8"

    def __init__(self, *, head: bool = False, ignored: tuple[str, ...] = ()) -> None:
        self.head = head
        self.ignored = ignored

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Int8:
        read = ConfigReader(config)
        return cls(head=read.flag("lm_head", False), ignored=read.names("modules_to_not_convert"))

    def layer(self, spec: LinearSpec) -> Int8Linear | None:
        applies = spec.role in PRODUCTS or (spec.role == "head" and self.head)
        if not applies or is_ignored(spec, self.ignored, "modules_to_not_convert"):
            return None
        return Int8Linear(spec)


class Int8Linear(QuantizedWeightLinear):
    """A product by an int8 weight. `static`: inputs are rounded with the checkpoint's scale;
    `wide`: they are never rounded; `rounds`: a weight in a wider type is rounded at load."""

    def __init__(
        self, spec: LinearSpec, *, static: bool = False, wide: bool = False, rounds: bool = True
    ) -> None:
        super().__init__(spec)
        self.rounds = rounds
        self.static = static
        self.wide = wide

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        """The weight in any type; its scales if it is int8."""
        plain = (self.spec.dtype, torch.bfloat16, torch.float16, torch.float32)
        step = (3.0 / self.spec.in_features) ** 0.5 / 127
        types = (*plain, torch.int8) if self.rounds else (torch.int8,)
        return {
            "weight": TensorSpec(
                (out_features, self.spec.in_features), types, axes=(("out", 1), ("in", 1))
            ),
            "weight_scale": TensorSpec(
                None, optional=True, dummy=None if self.rounds else step, axes=(("out", 1),)
            ),
            "input_scale": TensorSpec(
                (), optional=True, dummy=None if self.rounds else 0.01, axes=()
            ),
        }

    def ready(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
        for shard in self.spec.shards:
            shard_tensors = shards.get(shard, {})
            if "weight" not in shard_tensors:
                return False
            if shard_tensors["weight"].dtype == torch.int8:
                names = {"weight_scale", "input_scale"} if self.static else {"weight_scale"}
                if not names <= shard_tensors.keys():
                    return False
        return True

    def pack(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> QuantizedWeight:
        """Stack the shards, each with its own scales."""
        values, scales, input_scales = [], [], []
        for shard, rows in self.spec.shards.items():
            shard_tensors, source = shards[shard], self.spec.sources[shard]
            weight = shard_tensors["weight"]
            if weight.dtype == torch.int8:
                if "weight_scale" not in shard_tensors or (
                    self.static and "input_scale" not in shard_tensors
                ):
                    raise LoadError(f"{source} is int8 and has no weight_scale or input_scale")
                scale = shard_tensors["weight_scale"].float().reshape(-1)
                if scale.numel() not in (1, rows):
                    raise LoadError(f"{source} has {scale.numel()} scales for {rows} rows")
                if self.static:
                    input_scales.append(shard_tensors["input_scale"].float().reshape(1))
            else:
                weight, scale = round_to_int8(weight)
            values.append(weight)
            scales.append(scale.expand(rows))
        return QuantizedWeight(
            values=torch.cat(values),
            scale=torch.cat(scales)[None].contiguous(),
            group_size=self.spec.in_features,
            inputs="wide" if self.wide else "quantized",
            input_scale=torch.stack(input_scales).amax(dim=0) if input_scales else None,
        )

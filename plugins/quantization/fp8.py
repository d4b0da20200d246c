"""fp8 (e4m3) weights and activations: per tensor, per channel or in blocks of 128 x 128.

float8 tensors keep their scales; wider ones are rounded at load, with one scale per row. Large
batches also round inputs, if the device multiplies fp8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...core.errors import LoadError
from ...core.loading.quantization_config import ConfigReader, is_ignored
from ...core.nn.quantized import PRODUCTS, LinearSpec, QuantizedWeightLinear, TensorSpec
from ...core.nn.quantized_weight import QuantizedWeight, round_to_fp8
from ...core.parallel.sharding import FEATURES

FP8 = torch.float8_e4m3fn
BLOCK = 128
SCALE_NAMES = ("weight_scale", "weight_scale_inv")
"""Names of the weight's scale; block formats use the second."""
INPUT_SCALE_NAMES = ("input_scale", "activation_scale")
IGNORE_FIELDS = ("ignored_layers", "modules_to_not_convert")


class Fp8:
    """`quantization_config` fields: activation_scheme ("dynamic", "static"), weight_block_size
    ([128, 128]), ignored_layers or modules_to_not_convert, and, specific to this project, lm_head
    (true: the head is rounded, too).
    """

    name: ClassVar[str] = "fp8"

    def __init__(
        self, *, static: bool = False, blocks: bool = False, head: bool = False,
        ignored: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.static = static
        self.unit = BLOCK if blocks else 1
        self.blocks = blocks
        self.head = head
        self.ignored = ignored

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Fp8:
        read = ConfigReader(config)
        read.choice("fmt", ("e4m3",), "e4m3")
        scheme = read.choice("activation_scheme", ("dynamic", "static"), "dynamic")
        block = read.values.get("weight_block_size")
        if block is not None and list(block) != [BLOCK, BLOCK]:
            raise read.refuse("weight_block_size", f"[{BLOCK}, {BLOCK}]")
        if block is not None and scheme == "static":
            raise read.refuse("activation_scheme", "'dynamic' with weight_block_size")
        return cls(
            static=scheme == "static",
            blocks=block is not None,
            head=read.flag("lm_head", False),
            ignored=read.names(*IGNORE_FIELDS),
        )

    def layer(self, spec: LinearSpec) -> Fp8Linear | None:
        applies = spec.role in PRODUCTS or (spec.role == "head" and self.head)
        if not applies or is_ignored(spec, self.ignored, IGNORE_FIELDS[-1]):
            return None
        return Fp8Linear(spec, static=self.static, blocks=self.blocks)


class Fp8Linear(QuantizedWeightLinear):
    """A product by a float8 weight. `static`: inputs are rounded with the checkpoint's scale;
    `wide`: they are never rounded; `rounds`: a weight in a wider type is rounded at load."""

    def __init__(
        self, spec: LinearSpec, *, static: bool = False, blocks: bool = False, wide: bool = False,
        rounds: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(spec)
        self.wide = wide or blocks
        self.static = static
        self.blocks = blocks
        self.rounds = rounds

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        """The weight in any type; scales if it is float8."""
        size = self.spec.in_features
        plain = (self.spec.dtype, torch.bfloat16, torch.float16, torch.float32)
        types = (*plain, FP8) if self.rounds else (FP8,)
        specs = {"weight": TensorSpec((out_features, size), types, axes=(("out", 1), ("in", 1)))}
        scale = TensorSpec(None, optional=True, axes=(("out", 1),))
        if self.blocks:
            # A rank's rows may end within a block: each takes its own rows from the whole.
            scale = replace(scale, axes=(None, ("in", BLOCK)))
        for name in SCALE_NAMES:
            specs[name] = scale
        for name in INPUT_SCALE_NAMES:
            specs[name] = TensorSpec((), optional=True, axes=())
        if not self.rounds:
            specs[SCALE_NAMES[0]] = replace(scale, dummy=1.0)
            specs[INPUT_SCALE_NAMES[0]] = TensorSpec((), optional=True, dummy=0.01, axes=())
        return specs

    def ready(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
        return all(self._complete(shards.get(shard, {})) for shard in self.spec.shards)

    def _complete(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        if "weight" not in tensors:
            return False
        if tensors["weight"].dtype != FP8:
            return True
        scaled = _first(tensors, SCALE_NAMES) is not None
        return scaled and (not self.static or _first(tensors, INPUT_SCALE_NAMES) is not None)

    def pack(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> QuantizedWeight:
        """Stack the shards, each with its own scales."""
        values, scales, input_scales = [], [], []
        for shard in self.spec.shards:
            shard_tensors = shards[shard]
            weight = shard_tensors["weight"]
            if weight.dtype == FP8:
                scale = _first(shard_tensors, SCALE_NAMES)
                if scale is None:
                    names = " or ".join(SCALE_NAMES)
                    raise LoadError(f"{self.spec.sources[shard]} is float8 and has no {names}")
                if self.static:
                    input_scale = _first(shard_tensors, INPUT_SCALE_NAMES)
                    if input_scale is None:
                        raise LoadError(
                            f"{self.spec.sources[shard]} has no input_scale, and "
                            "activation_scheme is static"
                        )
                    input_scales.append(input_scale.float().reshape(1))
                scale = self._spread(scale.float(), weight.shape[0], shard)
            else:
                weight, row_scale = round_to_fp8(weight)
                groups = -(-self.spec.in_features // BLOCK) if self.blocks else 1
                scale = row_scale.expand(groups, -1)
            values.append(weight.view(torch.uint8))
            scales.append(scale)
        size = self.spec.in_features
        return QuantizedWeight(
            values=torch.cat(values).view(FP8),
            scale=torch.cat(scales, dim=1).contiguous(),
            group_size=BLOCK if self.blocks else size,
            inputs="wide" if self.wide else "quantized",
            input_scale=torch.stack(input_scales).amax(dim=0) if input_scales else None,
        )

    def _spread(self, scale: torch.Tensor, rows: int, shard: str) -> torch.Tensor:
        """→ [groups, rows], from scales per tensor, row or block."""
        if self.blocks:
            return self._of_rows(scale, rows, shard).t()
        if scale.numel() not in (1, rows):
            raise LoadError(
                f"the scale of {self.spec.sources[shard]} has shape {tuple(scale.shape)}: neither "
                f"one number nor one for each of {rows} rows"
            )
        return scale.reshape(-1).expand(rows).reshape(1, rows)

    def _of_rows(self, scale: torch.Tensor, rows: int, shard: str) -> torch.Tensor:
        """Blocks' scales of the whole shard → this rank's rows, [rows, groups]. Reordered shards
        already have a scale per row and 128 columns.
        """
        whole, own, sharding = rows, torch.arange(rows, device=scale.device), self.sharding
        if sharding is not None and FEATURES[sharding.dim] == "out":
            name = shard if shard in sharding.sizes else ""
            whole = sharding.sizes[name]
            own = torch.cat([
                torch.arange(piece.start, piece.stop, device=scale.device)
                for piece in sharding.slices[name]
            ])  # fmt: skip
        groups, blocks = -(-self.spec.in_features // BLOCK), -(-whole // BLOCK)
        if scale.numel() == 1:
            return scale.reshape(1, 1).expand(rows, groups)
        for count, unit in ((blocks, BLOCK), (whole, 1)):
            if scale.squeeze().shape == scale.new_empty(count, groups).squeeze().shape:
                return scale.reshape(count, groups)[own // unit]
        raise LoadError(
            f"the scale of {self.spec.sources[shard]} has shape {tuple(scale.shape)}, that of "
            f"blocks is {(blocks, groups)}"
        )


def _first(tensors: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> torch.Tensor | None:
    return next((tensors[name] for name in names if name in tensors), None)

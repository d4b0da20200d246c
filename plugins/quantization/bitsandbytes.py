"""4-bit weights by the bitsandbytes package: nf4 (and fp4), from a checkpoint or rounded at load.

The package dequantises in each product, so this saves memory but no time.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...core.errors import ConfigError, LoadError
from ...core.loading.quantization_config import ConfigReader, is_ignored
from ...core.nn.quantized import LinearSpec, QuantizedLinear, TensorSpec

PACKAGE = "bitsandbytes"
SKIPPED = "llm_int8_skip_modules"


class BitsAndBytes:
    """`quantization_config` fields: load_in_4bit (true), bnb_4bit_quant_type ("nf4", "fp4"),
    bnb_4bit_use_double_quant, llm_int8_skip_modules. Rounding at load makes nf4 in blocks of 64.
    """

    name: ClassVar[str] = "bitsandbytes"

    def __init__(self, kind: str, nested: bool, skipped: tuple[str, ...]) -> None:
        self.kind = kind
        self.nested = nested
        self.skipped = skipped

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if importlib.util.find_spec(PACKAGE) is None:
            return "the package bitsandbytes is not installed (pip install bitsandbytes)"
        try:
            importlib.import_module(PACKAGE)
        except Exception as error:  # Its libraries may not fit the machine.
            return f"the package bitsandbytes cannot be imported ({error})"
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BitsAndBytes:
        read = ConfigReader(config)
        if read.flag("load_in_8bit", False):
            raise read.refuse("load_in_8bit", "false: only 4 bits are served")
        if not read.flag("load_in_4bit", True):
            raise read.refuse("load_in_4bit", "true")
        read.choice("bnb_4bit_quant_storage", ("uint8",), "uint8")
        # A checkpoint without a type uses the package's default, fp4.
        kind = read.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4" if config else "nf4")
        nested = read.flag("bnb_4bit_use_double_quant", False)
        return cls(kind, nested, read.names(SKIPPED))

    def layer(self, spec: LinearSpec) -> BitsAndBytesLinear | None:
        """Raises ConfigError for a mixture's experts."""
        if spec.role == "experts":
            raise ConfigError(
                f"quantization: bitsandbytes does not store experts ({spec.prefix}); there are "
                "fp8, int8, rtn, awq, gptq and compressed-tensors for that",
                param="quantization",
            )
        if spec.role != "linear" or is_ignored(spec, self.skipped, SKIPPED):
            return None
        return BitsAndBytesLinear(spec, self.kind, self.nested)


class BitsAndBytesLinear(QuantizedLinear):
    """A product by 4-bit weights; each shard has its own table and blocks."""

    batch_invariant = True

    def __init__(self, spec: LinearSpec, kind: str, nested: bool) -> None:
        super().__init__(spec)
        self.kind = kind
        self.nested = nested
        self.functional = importlib.import_module(f"{PACKAGE}.functional")
        self.packed: list[tuple[torch.Tensor, Any]] = []
        """Each shard's bytes, with the package's state."""

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def tensors(self, out_features: int) -> Mapping[str, TensorSpec]:
        """The weight, plain or packed with the package's state."""
        plain = (self.spec.dtype, torch.bfloat16, torch.float16, torch.float32)
        size = self.spec.in_features
        return {
            "weight": TensorSpec(
                (out_features, size), plain, alternative=_bytes(out_features * size)
            ),
            "weight.absmax": TensorSpec(None, (torch.float32, torch.uint8), optional=True),
            "weight.quant_map": TensorSpec((16,), optional=True),
            "weight.nested_absmax": TensorSpec(None, optional=True),
            "weight.nested_quant_map": TensorSpec((256,), optional=True),
            self._state: TensorSpec(None, (torch.uint8,), optional=True),
        }

    def ready(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> bool:
        for shard in self.spec.shards:
            shard_tensors = shards.get(shard, {})
            if "weight" not in shard_tensors or (
                shard_tensors["weight"].dtype == torch.uint8 and self._lacks(shard_tensors)
            ):
                return False
        return True

    def _lacks(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        names = ["weight.absmax", "weight.quant_map", self._state]
        if self.nested:
            names += ["weight.nested_absmax", "weight.nested_quant_map"]
        return [name for name in names if name not in tensors]

    def process(self, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for index, (shard, rows) in enumerate(self.spec.shards.items()):
            shard_tensors, source = shards[shard], self.spec.sources[shard]
            weight = shard_tensors["weight"]
            if weight.dtype != torch.uint8:
                packed, state = self.functional.quantize_4bit(
                    weight.to(self.spec.dtype).contiguous(), blocksize=64, quant_type=self.kind
                )
            else:
                if lacks := self._lacks(shard_tensors):
                    raise LoadError(f"{source} is packed and has no {', '.join(lacks)}")
                packed = weight
                state = self.functional.QuantState.from_dict(
                    qs_dict={
                        n.removeprefix("weight."): t
                        for n, t in shard_tensors.items()
                        if n != "weight"
                    },
                    device=self.spec.device,
                )
            shape = (rows, self.spec.in_features)
            if tuple(state.shape) != shape:
                raise LoadError(f"{source}.weight is packed from {tuple(state.shape)}, not {shape}")
            if state.nested:
                state.absmax = self.functional.dequantize_blockwise(state.absmax, state.state2)
                state.absmax = (state.absmax + state.offset).float()
                state.nested, state.state2, state.offset = False, None, None
            state.dtype = self.spec.dtype
            state.absmax = self.keep(f"absmax_{index}", state.absmax)
            self.packed.append((self.keep(f"weight_{index}", packed), state))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        parts = [
            self.spec.operations.linear(
                x, self.functional.dequantize_4bit(packed, state).to(x.dtype)
            )
            for packed, state in self.packed
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _bytes(numbers: int) -> TensorSpec:
    """Two numbers per byte, in the package's shape."""
    return TensorSpec((numbers // 2, 1), (torch.uint8,))

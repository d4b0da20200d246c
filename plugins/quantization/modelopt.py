"""Checkpoints of NVIDIA's Model Optimizer: fp8, NVFP4, and both in one model."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch

from ...core.errors import ConfigError, listed
from ...core.loading.quantization_config import ConfigReader, is_ignored
from ...core.nn.quantized import LinearSpec, QuantizedLinear
from .fp8 import BLOCK, Fp8Linear
from .nvfp4 import GROUP, Nvfp4Linear, Nvfp4Tensors

Kind = Literal["fp8", "fp8 rows", "fp8 blocks", "nvfp4"]
KINDS: dict[str, Kind] = {
    "FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8 rows", "FP8_PB_WO": "fp8 blocks",
    "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4",
}  # fmt: skip
"""`quant_algo` → storage of a weight."""
MIXED = "MIXED_PRECISION"
TENSORS = Nvfp4Tensors("weight", "weight_scale_2", "input_scale")
UNITS: dict[Kind, int] = {"fp8": 1, "fp8 rows": 1, "fp8 blocks": BLOCK, "nvfp4": GROUP}
"""Features stored together."""


class ModelOpt:
    """`quantization_config` fields: quant_algo; quantized_layers (name → quant_algo, for mixed
    precision); ignore (names, in which * stands for anything); kv_cache_scheme. In the older file
    the same is in `quantization`, with exclude_modules and kv_cache_quant_algo."""

    name: ClassVar[str] = "modelopt"
    config_file: ClassVar[str] = "hf_quant_config.json"

    def __init__(
        self,
        kind: Kind | None,
        layers: Mapping[str, Kind],
        ignored: tuple[str, ...],
        kv_cache_dtype: str | None,
    ) -> None:
        """kind: of all layers except `ignored`; None: only `layers` are quantized."""
        self.kind = kind
        self.layers = layers
        self.ignored = ignored
        self.kv_cache_dtype = kv_cache_dtype
        kinds = set(layers.values()) if kind is None else {kind}
        self.unit = max(UNITS[one] for one in kinds)

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelOpt:
        read = ConfigReader(config)
        if (older := read.inner("quantization")) is not None:
            read = older
        layers: dict[str, Kind] = {}
        if _algorithm(read) == MIXED:
            quantized = read.inner("quantized_layers")
            if quantized is None or not quantized.values:
                raise read.refuse("quantized_layers", "an object with at least one layer")
            for name in quantized.values:
                if (inner := quantized.inner(name)) is not None:
                    layers[name] = _kind(inner)
        cache = read.inner("kv_cache_scheme")
        if cache is not None:
            cache.choice("type", ("float",), None)
            cache.choice("num_bits", (8,), None)
        rounded = cache is not None or read.choice("kv_cache_quant_algo", ("FP8",), None)
        return cls(
            None if layers else _kind(read),
            layers,
            tuple(_pattern(name) for name in read.names("ignore", "exclude_modules")),
            "fp8_e4m3" if rounded else None,
        )

    def layer(self, spec: LinearSpec) -> QuantizedLinear | None:
        """Raises ConfigError if rows are not whole groups, or a layer's parts are stored
        differently.
        """
        if spec.role == "embedding" or is_ignored(spec, self.ignored, "ignore"):
            return None
        kinds = {self._kind_of(source) for source in spec.sources.values()}
        if len(kinds) > 1:
            raise ConfigError(
                f"quantization_config.quantized_layers: {listed(spec.sources.values(), 4)} are "
                "stored differently, and are computed as one layer",
                param="quantization_config.quantized_layers",
            )
        (kind,) = kinds
        if kind is None:
            return None
        if kind == "nvfp4":
            return Nvfp4Linear(spec, TENSORS)
        return Fp8Linear(spec, static=kind == "fp8", blocks=kind == "fp8 blocks", rounds=False)

    def _kind_of(self, source: str) -> Kind | None:
        """Return a layer's storage, by its name or that of a module around it."""
        if self.kind is not None:
            return self.kind
        while source and source not in self.layers:
            source = source.rpartition(".")[0]
        return self.layers.get(source)


def _algorithm(read: ConfigReader) -> str:
    value = read.values.get("quant_algo")
    if not isinstance(value, str):
        raise read.refuse("quant_algo", " or ".join([*KINDS, MIXED]))
    return value.upper()


def _kind(read: ConfigReader) -> Kind:
    kind = KINDS.get(_algorithm(read))
    if kind is None:
        raise read.refuse("quant_algo", " or ".join(KINDS))
    if kind == "nvfp4":
        read.choice("group_size", (GROUP,), GROUP)
    return kind


def _pattern(name: str) -> str:
    """Convert a name with wildcards to a regular expression for a layer or a module around it."""
    if not any(character in name for character in "*?["):
        return name
    return "re:" + fnmatch.translate(name).removesuffix(r"\Z").removesuffix(r"\z") + r"(\.|$)"

"""The contract of quantization methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from ..nn.quantized import LinearSpec, QuantizedLinear


class QuantizationMethod(Protocol):
    """A method of storing and applying weights: a checkpoint format, or rounding at load.

    One instance serves a model. It chooses the replacement of each layer: `core.nn.quantized` has
    the base classes of such layers, `core.nn.quantized_weight` the layouts that the operations
    multiply by; a method that repacks into one of these needs no kernel of its own. One linear
    layer of all experts of a mixture (`core.nn.experts`) is a merged layer of the role "experts";
    return None for an unknown role. Scales of an fp8 cache need no method: the checkpoint's
    `k_scale` and `v_scale` go to the attention layers.
    """

    name: ClassVar[str]
    config_file: ClassVar[str]
    """A JSON file of the checkpoint that says what `quantization_config` would, for one whose
    config.json has none; its name has "quant" in it. Optional."""
    kv_cache_dtype: str | None
    """The value of `EngineConfig.kv_cache_dtype` "auto", if the checkpoint requires another type
    than the model's. Optional."""
    unit: int
    """Features that it stores together: ranks divide an MLP's inner ones at multiples of it.
    Optional."""

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return None if it can run here, else the reason why not, in one clause."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationMethod:
        """Build from the checkpoint's `quantization_config`; empty if it has none (the method was
        named in `EngineConfig.quantization`). Raises ConfigError with the field's name. A field
        that says how weights are stored (bits, group size, …) is applied or refused.
        """

    def layer(self, spec: LinearSpec) -> QuantizedLinear | None:
        """Return the replacement of the layer `spec`; None: the layer is kept. The replacement adds
        the layer's bias, and returns results in the type of its inputs."""

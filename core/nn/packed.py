"""The old place of `QuantizedWeight`."""

from __future__ import annotations

from ..old_names import module_getattr

__getattr__ = module_getattr(
    __name__, {"PackedWeight": "jackfield.core.nn.quantized_weight.QuantizedWeight"}
)

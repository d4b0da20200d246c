"""Quantization methods that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl

HERE = "jackfield.plugins.quantization"


@hookimpl
def register_quantization(registry: Any) -> None:
    registry.add("fp8", f"{HERE}.fp8:Fp8")
    registry.add("fbgemm_fp8", f"{HERE}.fp8:Fp8", help="The same layout, by another tool")

"""Quantization methods that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl

HERE = "jackfield.plugins.quantization"


@hookimpl
def register_quantization(registry: Any) -> None:
    registry.add("fp8", f"{HERE}.fp8:Fp8")
    registry.add("fbgemm_fp8", f"{HERE}.fp8:Fp8", help="The same layout, by another tool")
    registry.add("bitsandbytes", f"{HERE}.bitsandbytes:BitsAndBytes")
    registry.add("int8", f"{HERE}.int8:Int8")
    registry.add("mxfp4", f"{HERE}.mxfp4:Mxfp4")
    registry.add("modelopt", f"{HERE}.modelopt:ModelOpt")
    registry.add("modelopt_fp4", f"{HERE}.modelopt:ModelOpt", help="As modelopt")
    registry.add("modelopt_mixed", f"{HERE}.modelopt:ModelOpt", help="As modelopt")
    registry.add("rtn", f"{HERE}.rtn:Rtn")
    registry.add("gptq", f"{HERE}.gptq:Gptq")
    registry.add("gptq_marlin", f"{HERE}.gptq:Gptq", help="As gptq")
    registry.add("awq", f"{HERE}.awq:Awq")
    registry.add("awq_marlin", f"{HERE}.awq:Awq", help="As awq")
    registry.add("compressed-tensors", f"{HERE}.compressed_tensors:CompressedTensors")

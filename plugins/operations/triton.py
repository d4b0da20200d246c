"""`Operations` on this project's Triton kernels.

Operations whose launcher has the same arguments are that launcher: `name = staticmethod(launcher)`.
"""

from __future__ import annotations

import os
from typing import ClassVar

import torch

from ...core.nn.operations import Operations

try:
    from .layers import TritonLayers

    _MISSING = None
except ImportError as error:
    _MISSING = f"triton cannot be imported ({error})"
    TritonLayers = Operations  # type: ignore[assignment, misc]


class TritonOperations(TritonLayers):
    name: ClassVar[str] = "triton"
    features: ClassVar[frozenset[str]] = Operations.features | {
        "sample_parts.tokens", "linear.norm_sums",
    }  # fmt: skip

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if _MISSING is not None:
            return _MISSING
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return "it needs a CUDA device"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"dtype {dtype} is not float32, float16 or bfloat16"
        return None

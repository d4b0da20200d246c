"""Implementations of the layers' arithmetic that ship in the box."""

from __future__ import annotations

import os
from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_operations(registry: Any) -> None:
    # Triton's interpreter runs kernels on the CPU, slowly: then only for whoever asks by name.
    priority = 5 if os.environ.get("TRITON_INTERPRET") == "1" else 20
    registry.add(
        "triton", "jackfield.plugins.operations.triton:TritonOperations", priority=priority
    )
    registry.add("torch", "jackfield.core.nn.operations:Operations", priority=10)

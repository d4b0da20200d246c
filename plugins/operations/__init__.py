"""Implementations of the layers' arithmetic that ship in the box."""

from __future__ import annotations

import os
from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_operations(registry: Any) -> None:
    # Triton's interpreter runs kernels on the CPU, slowly: then only for whoever asks by name.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    registry.add(
        "triton",
        "jackfield.plugins.operations.triton:TritonOperations",
        priority=5 if interpreted else 20,
    )
    registry.add("torch", "jackfield.core.nn.operations:Operations", priority=10)
    # Slower, for `batch_invariant`, which others do not serve.
    registry.add(
        "triton_invariant",
        "jackfield.plugins.operations.triton_invariant:InvariantTritonOperations",
        priority=2 if interpreted else 4,
    )
    registry.add(
        "torch_invariant",
        "jackfield.plugins.operations.torch_invariant:InvariantTorchOperations",
        priority=3,
    )

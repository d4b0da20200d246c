"""Attention backends that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_attention_backends(registry: Any) -> None:
    registry.add("triton", "jackfield.plugins.attention.triton:TritonAttention", priority=20)
    registry.add("torch", "jackfield.plugins.attention.torch:TorchAttention", priority=10)

"""Attention backends that ship in the box."""

from __future__ import annotations

import os
from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_attention_backends(registry: Any) -> None:
    # Triton's interpreter runs kernels slowly on the CPU, so there it must be chosen by name.
    priority = 5 if os.environ.get("TRITON_INTERPRET") == "1" else 20
    registry.add("triton", "jackfield.plugins.attention.triton:TritonAttention", priority=priority)
    registry.add(
        "flashinfer", "jackfield.plugins.attention.flashinfer:FlashInferAttention", priority=15
    )
    registry.add("torch", "jackfield.plugins.attention.torch:TorchAttention", priority=10)
    registry.add("flex", "jackfield.plugins.attention.flex:FlexAttention", priority=8)


@hookimpl
def register_latent_attention_backends(registry: Any) -> None:
    priority = 5 if os.environ.get("TRITON_INTERPRET") == "1" else 20
    registry.add(
        "triton",
        "jackfield.plugins.attention.triton_latent:TritonLatentAttention",
        priority=priority,
    )
    registry.add(
        "torch", "jackfield.plugins.attention.torch_latent:TorchLatentAttention", priority=10
    )

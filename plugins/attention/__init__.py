"""Attention backends that ship in the box."""

from __future__ import annotations

import os
from typing import Any

from ...core.hooks import hookimpl


def also(*names: str) -> tuple[str, ...]:
    """Return vLLM's names for a backend of the same kind, in upper and lower case."""
    return (*names, *(name.lower() for name in names))


@hookimpl
def register_attention_backends(registry: Any) -> None:
    # Triton's interpreter runs kernels slowly on the CPU, so there it must be chosen by name.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    registry.add(
        "triton",
        "jackfield.plugins.attention.triton:TritonAttention",
        priority=5 if interpreted else 20,
        aliases=also("TRITON", "TRITON_ATTN", "FLASH_ATTN"),
    )
    registry.add(
        "flashinfer",
        "jackfield.plugins.attention.flashinfer:FlashInferAttention",
        priority=15,
        aliases=("FLASHINFER",),
    )
    registry.add(
        "torch",
        "jackfield.plugins.attention.torch:TorchAttention",
        priority=10,
        aliases=also("TORCH", "TORCH_SDPA", "CPU_ATTN"),
    )
    # Slower, for `batch_invariant`, which others do not serve.
    registry.add(
        "triton_invariant",
        "jackfield.plugins.attention.triton_invariant:InvariantTritonAttention",
        priority=2 if interpreted else 4,
    )
    registry.add(
        "torch_invariant",
        "jackfield.plugins.attention.torch_invariant:InvariantTorchAttention",
        priority=3,
    )
    # By name alone, where something is wrong with a kernel for one kind of GPU.
    registry.add(
        "triton_portable",
        "jackfield.plugins.attention.triton_portable:PortableTritonAttention",
        priority=1,
    )
    for name in ("flex", *also("FLEX_ATTENTION")):
        registry.refuse(name, "torch and triton compute what it did; name one of them, or auto")


@hookimpl
def register_latent_attention_backends(registry: Any) -> None:
    priority = 5 if os.environ.get("TRITON_INTERPRET") == "1" else 20
    registry.add(
        "triton",
        "jackfield.plugins.attention.triton_latent:TritonLatentAttention",
        priority=priority,
        aliases=also(
            "TRITON",
            "TRITON_ATTN",
            "TRITON_MLA",
            "FLASH_ATTN",
            "FLASH_ATTN_MLA",
            "FLASHMLA",
            "CUTLASS_MLA",
        ),
    )
    registry.add(
        "torch",
        "jackfield.plugins.attention.torch_latent:TorchLatentAttention",
        priority=10,
        aliases=also("TORCH", "TORCH_SDPA", "CPU_ATTN", "CPU_MLA"),
    )

"""Every attention backend in the box passes the kit, where it can run."""

from __future__ import annotations

import torch

from jackfield.plugins.conformance.attention import AttentionBackendKit

EVERYTHING = frozenset(
    {
        "sliding_window", "attention_chunk_size", "chunk_lookback", "soft_cap", "alibi_slopes",
        "sinks",
    }
)  # fmt: skip
ON_A_GPU = frozenset({"bfloat16"} if torch.cuda.is_available() else {"float16"})


class TestTorch(AttentionBackendKit):
    name = "torch"
    promised = EVERYTHING | {"distance_bias", "float32", "float16", "bfloat16"}


class TestTriton(AttentionBackendKit):
    name = "triton"
    promised = EVERYTHING | {"distance_bias", "float32"} | ON_A_GPU


class TestFlashInfer(AttentionBackendKit):
    """Where the package and a GPU are; elsewhere its refusals alone."""

    name = "flashinfer"

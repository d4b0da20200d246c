"""Every attention backend in the box passes the kit, where it can run."""

from __future__ import annotations

import pytest
import torch
from one_order import OneOrder

from jackfield.plugins.conformance.attention import AttentionBackendKit
from jackfield.plugins.conformance.invariance import InvariantAttention
from jackfield.plugins.conformance.paged_backends import PagedBackendKit

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is for the CPU")
class TestTorchInvariant(AttentionBackendKit):
    name = "torch_invariant"
    promised = EVERYTHING | {"distance_bias", "float32", "float16", "bfloat16"}


class TestTritonInvariantSteps(OneOrder, InvariantAttention, PagedBackendKit):
    kind = "attention_backend"
    name = "triton_invariant"
    promised = frozenset({"float32"}) | ON_A_GPU
    plain_spec = AttentionBackendKit.plain_spec


@pytest.mark.slow
class TestTritonInvariant(AttentionBackendKit):
    name = "triton_invariant"
    promised = EVERYTHING | {"distance_bias", "float32"} | ON_A_GPU


class TestFlashInfer(AttentionBackendKit):
    """Where the package and a GPU are; elsewhere its refusals alone."""

    name = "flashinfer"

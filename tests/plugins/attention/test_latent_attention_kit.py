"""Every latent attention backend in the box passes the kit, where it can run."""

from __future__ import annotations

import pytest
import torch

from jackfield.plugins.conformance.latent_attention import LatentAttentionBackendKit


class TestTorch(LatentAttentionBackendKit):
    name = "torch"
    promised = frozenset({"float32", "float16", "bfloat16"})


@pytest.mark.filterwarnings("ignore:invalid value encountered")
class TestTriton(LatentAttentionBackendKit):
    name = "triton"
    promised = frozenset({"float32", "bfloat16" if torch.cuda.is_available() else "float16"})

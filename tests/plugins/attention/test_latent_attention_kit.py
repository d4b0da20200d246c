"""Every latent attention backend in the box passes the kit, where it can run."""

from __future__ import annotations

from jackfield.plugins.conformance.latent_attention import LatentAttentionBackendKit


class TestTorch(LatentAttentionBackendKit):
    name = "torch"
    promised = frozenset({"float32", "float16", "bfloat16"})

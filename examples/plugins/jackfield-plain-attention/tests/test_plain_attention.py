"""The backend passes Jackfield's kit, and refuses nothing of what it says it knows."""

from __future__ import annotations

from jackfield.plugins.conformance.attention import AttentionBackendKit


class TestPlain(AttentionBackendKit):
    name = "plain"
    promised = frozenset(
        {"float32", "float16", "bfloat16", "sliding_window", "soft_cap", "alibi_slopes", "sinks"}
    )

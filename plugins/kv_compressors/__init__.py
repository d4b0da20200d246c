"""KV compressors that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_kv_compressors(registry: Any) -> None:
    registry.add("window", "jackfield.plugins.kv_compressors.builtin:Window")
    registry.add("key_norm", "jackfield.plugins.kv_compressors.builtin:KeyNorm")

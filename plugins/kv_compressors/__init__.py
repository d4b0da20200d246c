"""KV compressors that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_kv_compressors(registry: Any) -> None:
    registry.add("window", "jackfield.plugins.kv_compressors.by_keys:Window")
    registry.add("key_norm", "jackfield.plugins.kv_compressors.by_keys:KeyNorm")
    registry.add("key_diff", "jackfield.plugins.kv_compressors.by_keys:KeyDiff")
    registry.add("snap_kv", "jackfield.plugins.kv_compressors.by_queries:SnapKV")
    registry.add("snap_kv_merge", "jackfield.plugins.kv_compressors.by_queries:MergingSnapKV")
    registry.add(
        "expected_attention", "jackfield.plugins.kv_compressors.by_queries:ExpectedAttention"
    )
    registry.add("r_kv", "jackfield.plugins.kv_compressors.by_queries:RKV")
    registry.add("r_kv_fast", "jackfield.plugins.kv_compressors.fast:FastRKV")
    registry.add("snap_kv_merge_fast", "jackfield.plugins.kv_compressors.fast:FastMergingSnapKV")
    registry.add("weighted", "jackfield.plugins.kv_compressors.weighted:Weighted")

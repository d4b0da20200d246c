"""Statistics and room of several engines as those of one."""

from __future__ import annotations

import msgspec

from jackfield.core.data_parallel.member import total
from jackfield.core.data_parallel.pooled_cores import common_info
from jackfield.core.outputs import EngineStats
from jackfield.core.protocols.executors import ExecutorInfo


def test_counts_are_added_by_key_too() -> None:
    first = EngineStats(
        steps=3, kv_blocks_total=10, kv_blocks_used=5, requests_finished={"stop": 2},
        spec_decode_num_accepted_tokens_per_pos={0: 4, 1: 1},
    )  # fmt: skip
    second = EngineStats(
        steps=4, kv_blocks_total=10, requests_finished={"stop": 1, "length": 1},
        spec_decode_num_accepted_tokens_per_pos={0: 2, 1: 2},
    )  # fmt: skip
    both = total([first, EngineStats(), second])
    assert both.steps == 7 and both.kv_cache_usage == 0.25
    assert both.requests_finished == {"stop": 3, "length": 1}
    assert both.spec_decode_num_accepted_tokens_per_pos == {0: 6, 1: 3}


def test_the_smallest_room_counts() -> None:
    small = ExecutorInfo(
        num_blocks=7, device="cpu", dtype="float32", attention_backend="torch",
        attention_reason="it is there", weight_bytes=1, kv_cache_bytes=1, load_seconds=1.0,
        max_model_len=96,
    )  # fmt: skip
    large = msgspec.structs.replace(small, num_blocks=9, max_model_len=128)
    for infos in ([small, large], [large, small]):
        assert common_info(infos) == small
    fixed = [msgspec.structs.replace(info, max_model_len=None) for info in (large, small)]
    assert common_info(fixed) == fixed[1]

"""Statistics of several engines as those of one."""

from __future__ import annotations

from jackfield.core.data_parallel.member import total
from jackfield.core.outputs import EngineStats


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

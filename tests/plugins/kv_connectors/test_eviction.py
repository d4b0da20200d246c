"""The order in which a tier's blocks go, against its definition."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jackfield.plugins.kv_connectors.eviction import SavedBlocks


def first_to_go(eviction: str, blocks: dict[bytes, dict[str, Any]], kept: set[int]) -> bytes | None:
    """By definition: every block is looked at."""
    free = {key: each for key, each in blocks.items() if each["row"] not in kept}
    order = {
        "recency": lambda key: free[key]["used"],
        "frequency": lambda key: (free[key]["age"] + free[key]["count"], free[key]["used"]),
        "importance": lambda key: (-free[key]["priority"], free[key]["used"]),
    }[eviction]
    return min(free, key=order, default=None)


@pytest.mark.parametrize("eviction", ["recency", "frequency", "importance"])
def test_blocks_go_in_the_chosen_order(eviction: Any) -> None:
    draw = random.Random(4)
    saved, blocks = SavedBlocks(eviction), dict[bytes, dict[str, Any]]()
    age = gone = 0
    for time in range(3000):
        key, priority = str(draw.randrange(40)).encode(), draw.randrange(-3, 4)
        if key in blocks:
            saved.use(key, priority)
            each = blocks[key]
            each |= {
                "used": time, "age": age, "count": each["count"] + 1,
                "priority": min(each["priority"], priority),
            }  # fmt: skip
        elif len(blocks) < 12:
            row = next(n for n in range(12) if n not in [b["row"] for b in blocks.values()])
            saved.add(key, row, priority)
            blocks[key] = {"row": row, "used": time, "age": age, "count": 1, "priority": priority}
        else:
            kept = {draw.randrange(12), draw.randrange(12)}
            expected = first_to_go(eviction, blocks, kept)
            assert expected is not None
            each = blocks.pop(expected)
            assert saved.evict(kept) == each["row"]
            age, gone = each["age"] + each["count"], gone + 1
        assert len(saved) == len(blocks) and all(saved.row(k) == blocks[k]["row"] for k in blocks)
    assert gone > 300 and SavedBlocks(eviction).evict(()) is None
    assert saved.evict(range(12)) is None and saved.row(b"unknown") is None

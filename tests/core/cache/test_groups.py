"""Which layers share a block table, and what a sequence then holds."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest

from jackfield.core.cache.groups import (
    MAX_WASTE,
    CacheGroup,
    CachePart,
    TokenCache,
    form_groups,
    longest_sequence,
    sequence_blocks,
)
from jackfield.core.cache.reach import Reach


def window(size: int | None) -> Reach | None:
    return None if size is None else Reach(size)


def layers(*windows: int | None, heads: int = 2) -> list[TokenCache]:
    part = CachePart("key", (heads, 8), "bfloat16")
    return [TokenCache((part,), window(size)) for size in windows]


GEMMA3 = {
    "270m": ([512] * 5 + [None]) * 3,
    "1b": ([512] * 5 + [None]) * 4 + [512, 512],
    "4b": ([1024] * 5 + [None]) * 5 + [1024] * 4,
    "12b": ([1024] * 5 + [None]) * 8,
    "27b": ([1024] * 5 + [None]) * 10 + [1024, 1024],
}


@pytest.mark.parametrize("windows", GEMMA3.values(), ids=GEMMA3)
@pytest.mark.parametrize("max_model_len", [4096, 32768, 131072])
def test_every_layer_is_in_one_group_and_little_is_wasted(windows, max_model_len):
    groups = form_groups(layers(*windows), max_model_len=max_model_len, block_size=16)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(window(windows[n]) == group.reach for group in groups for n in group.layers)
    size = max(len(group.layers) for group in groups)
    count = sum(group.most_blocks(max_model_len, 16, 1) * size for group in groups)
    needed = sum(CacheGroup((), window(w)).most_blocks(max_model_len, 16, 1) for w in windows)
    assert needed <= count <= needed * (1 + MAX_WASTE)
    assert groups[0].reach is None, "the longest table is the first"
    assert len(groups) <= 9


def test_equal_layers_are_one_group():
    assert form_groups(layers(None, None), max_model_len=99, block_size=16) == (
        CacheGroup((0, 1), None),
    )
    assert form_groups(layers(24, 24, 24), max_model_len=99, block_size=16) == (
        CacheGroup((0, 1, 2), Reach(24)),
    )


def test_a_window_that_no_sequence_outgrows_is_none():
    assert form_groups(layers(24, None, 24), max_model_len=24, block_size=16) == (
        CacheGroup((0, 1, 2), None),
    )
    assert len(form_groups(layers(24, None, 24), max_model_len=25, block_size=16)) > 1


def test_layers_of_other_sizes_keep_everything():
    """A block has the same bytes in every group, so that one pool serves them all."""
    mixed = layers(24, heads=1) + layers(None, heads=4)
    whole = CacheGroup((0, 1), None, inner_reaches=(Reach(24),))
    assert form_groups(mixed, max_model_len=99, block_size=16) == (whole,)
    windows = layers(24, heads=1) + layers(24, heads=4)
    assert form_groups(windows, max_model_len=99, block_size=16) == (CacheGroup((0, 1), Reach(24)),)


def test_chunks_and_windows_of_one_size_are_groups_apart():
    part = CachePart("key", (2, 8), "bfloat16")
    reaches = [Reach(32), Reach(chunk_size=32), Reach(chunk_size=16, chunk_lookback=1), None]
    specs = [TokenCache((part,), reach) for reach in reaches]
    groups = form_groups(specs, max_model_len=33, block_size=16)
    assert [group.reach for group in groups] == [None, *reaches[:3]]
    assert form_groups(specs, max_model_len=32, block_size=16) == (CacheGroup((0, 1, 2, 3)),)


@pytest.mark.parametrize(
    ("chunk_size", "chunk_lookback", "first"),
    [
        (1, 0, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (4, 0, [0, 0, 0, 0, 4, 4, 4, 4, 8]),
        (3, 1, [0, 0, 0, 0, 0, 0, 3, 3, 3]),
        (2, 2, [0, 0, 0, 0, 0, 0, 2, 2, 4]),
    ],
)
def test_a_token_sees_its_chunk_and_those_before_it(chunk_size, chunk_lookback, first):
    reach = Reach(chunk_size=chunk_size, chunk_lookback=chunk_lookback)
    assert [max(0, reach.first_visible(position)) for position in range(9)] == first
    most = max(position - reach.first_visible(position) + 1 for position in range(99))
    assert reach.most_tokens == most


@pytest.mark.parametrize(
    "reach",
    [
        *map(Reach, (1, 2, 5, 16, 17, 40)),
        *(Reach(chunk_size=size) for size in (1, 2, 5, 16, 24)),
        *(Reach(chunk_size=size, chunk_lookback=2) for size in (3, 12)),
    ],
    ids=lambda reach: "-".join(map(str, msgspec.structs.astuple(reach))),
)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 16, 50])
def test_most_blocks_is_what_the_worst_alignment_needs(reach, block_size, chunk):
    group = CacheGroup((), reach)
    for length in (1, 7, 64, 200):
        count = max(
            math.ceil(min(start + chunk, length) / block_size)
            - group.first_block(start, block_size)
            for start in range(length)
        )
        most = group.most_blocks(length, block_size, chunk)
        assert count <= most
        if length == 200 and chunk < 50:
            assert count == most


def test_the_longest_sequence_is_the_longest_that_fits():
    groups = (CacheGroup((0,)), CacheGroup((1,), Reach(20)), CacheGroup((2,), Reach(33)))
    for blocks in range(60):
        longest = longest_sequence(groups, blocks, 4, 8, 100)
        assert longest == 0 or sequence_blocks(groups, longest, 4, 8) <= blocks
        assert longest == 100 or sequence_blocks(groups, longest + 1, 4, 8) > blocks
    assert longest_sequence((CacheGroup(),), 25, 4, 8, 1000) == 100
    assert longest_sequence((CacheGroup((), Reach(9)),), 25, 4, 8, 1000) == 1000
    assert longest_sequence((CacheGroup(),), -1, 4, 8, 1000) == 0
    lengths = [longest_sequence(groups, blocks, 4, 8, 100) for blocks in range(60)]
    assert all(a <= b for a, b in pairwise(lengths))

"""Which tiles the programs of Hopper's prompt kernel compute. Triton's interpreter cannot run it:
its functions of numbers alone are run as Python."""

from __future__ import annotations

import random
import types
from collections import Counter
from itertools import accumulate
from typing import Any, NamedTuple

import pytest

copies = pytest.importorskip("jackfield.kernels.attention.hopper_copies")
reach = pytest.importorskip("jackfield.kernels.attention.reach")
row_tiles = pytest.importorskip("jackfield.kernels.attention.row_tiles")
GROUPS = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 48, 128]


class Pointer(NamedTuple):
    numbers: list[int]
    place: int = 0

    def __add__(self, offset: int) -> Pointer:  # type: ignore[override]
        return self._replace(place=self.place + offset)


def as_python(function: Any, language: types.SimpleNamespace) -> Any:
    """The Python of a kernel's function, and of what it calls. It divides integers down, a kernel
    to zero, which differs for negative ones alone."""
    code, names = function.fn.__code__, dict(function.fn.__globals__, gl=language, tl=language)
    for name in code.co_names:
        if hasattr(names.get(name), "fn"):
            names[name] = as_python(names[name], language)
    return types.FunctionType(code, names)


def test_every_query_is_computed_once_with_the_keys_that_it_sees() -> None:
    """Of rows of any lengths, none included, by fewer programs than tiles."""
    draw = random.Random(0)
    here = {"programs": 1, "program": 0}
    language = types.SimpleNamespace(
        load=lambda pointer: pointer.numbers[pointer.place], minimum=min, maximum=max,
        num_programs=lambda axis: here["programs"], program_id=lambda axis: here["program"],
        constexpr=None,
    )  # fmt: skip
    tile_of, number_of, count_tiles = (
        as_python(function, language)
        for function in (copies.tile_of, copies.number_of, row_tiles.tiles_of_rows)
    )
    for _ in range(150):
        group, block_n, kv_heads = draw.choice(GROUPS), draw.choice([64, 128]), draw.choice([1, 3])
        block_q = draw.choice([128, 192]) // group
        within = draw.choice([(None, None, 0), (draw.randrange(1, 300), None, 0), (None, 96, 1)])
        window, chunk = reach.reach_constants(*within).values()
        counts = [draw.choice([0, 1, 2, draw.randrange(300)]) for _ in range(draw.randrange(1, 7))]
        lengths = [count + draw.choice([0, 1, draw.randrange(700)]) for count in counts]
        starts = [0, *accumulate(counts)]
        first_row = draw.randrange(len(counts))
        rows = range(first_row, len(counts))
        used = count_tiles(Pointer(starts), first_row, len(rows), block_q)
        assert used == sum(counts[first_row:]) // block_q + len(rows), "the host's launch"
        here["programs"] = draw.choice([1, 3, used * kv_heads])
        rounds = -(-used * kv_heads // here["programs"])
        tiles = Pointer(starts), Pointer(lengths), first_row, len(rows), used, rounds
        computed: Counter[tuple[int, int, int]] = Counter()
        for program in range(here["programs"]):
            here["program"] = program
            for number in map(number_of, range(rounds)):
                if number >= used * kv_heads:
                    continue
                head, row, local, start, count, length, first, last, lower, begin, end = tile_of(
                    number, tiles, kv_heads, block_q, block_n, window, chunk
                )
                if begin >= end:
                    assert local >= count
                    continue
                queries = range(local, min(local + block_q, count))
                computed.update((row, head, query) for query in queries)
                assert (start, count, length) == (starts[row], counts[row], lengths[row])
                assert (first, last) == tuple(length - count + queries[at] for at in (0, -1))
                assert lower == first_seen(first, window, chunk)
                assert (begin, end) == (lower // block_n, last // block_n + 1)
        assert computed == Counter(
            (row, head, query)
            for row in rows for head in range(kv_heads) for query in range(counts[row])
        )  # fmt: skip


def first_seen(position: int, window: int, chunk: int) -> int:
    """The first position that a query sees."""
    if chunk:
        return max(0, position // chunk * chunk + chunk - window)
    return max(0, position - window + 1) if window else 0

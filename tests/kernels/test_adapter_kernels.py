"""Adapters' kernels against their torch reference, and against products by hand."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from one_order import sum_products_in_one_order

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.nn.operations import Operations
from jackfield.core.nn.step_operations.adapters import (
    AdapterChunks,
    AdapterTables,
    SiteWeights,
    chunk_count,
)
from jackfield.kernels.adapters import shrink, tiles
from jackfield.kernels.adapters.tiles import adapter_tiles
from jackfield.plugins.operations.triton import TritonOperations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's products of bfloat16 are wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
REFERENCE, KERNELS = Operations(), TritonOperations()


class Case(NamedTuple):
    """A site, and what each of its adapters has."""

    inputs: int
    bounds: tuple[int, ...]
    ranks: Sequence[Sequence[int]]
    """[P][S]"""


MERGED = Case(200, (0, 96, 128, 160), [[16, 0, 3], [5, 20, 8], [0, 0, 1], [12, 12, 12]])
ALONE = Case(384, (0, 72), [[8], [70], [1]])


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def site_of(case: Case, dtype: torch.dtype, seed: int = 0) -> SiteWeights:
    """Adapters whose rank rows are anywhere in the pools; no adapter's are NaN."""
    ranks = torch.tensor(case.ranks, dtype=torch.int32)
    most = int(ranks.max())
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(2 * most * len(ranks), generator=generator)
    parts, width = len(case.bounds) - 1, case.inputs
    rows = draw(len(order), 16 + parts * width + case.bounds[-1], dtype=dtype, seed=1)
    a = rows[:, 16 : 16 + parts * width].view(-1, parts, width).mul_(width**-0.5)
    b = rows[:, 16 + parts * width :].mul_(0.3)
    used = torch.zeros(len(order), dtype=torch.bool)
    rank_rows = torch.zeros(len(ranks), most, dtype=torch.int32)
    for place, row in enumerate(ranks.amax(dim=1).tolist()):
        rank_rows[place, :row] = order[place * most :][:row]
        used[order[place * most :][:row]] = True
    rows[~used], rows[:, :16] = torch.nan, torch.nan
    # Columns of tables that all sites share, as the pools' are of rows that they share.
    scales = (torch.rand(len(ranks), 9, generator=generator) + 0.5)[:, 3 : 3 + ranks.shape[1]]
    ranks = torch.nn.functional.pad(ranks, (2, 5), value=99)[:, 2:-5]
    return SiteWeights(
        a, b, case.bounds, rank_rows.to(DEVICE), ranks.to(DEVICE),
        scales.to(DEVICE),
    )  # fmt: skip


def chunks_of(places: Sequence[int], size: int = 16, spare: int = 2) -> AdapterChunks:
    """Chunks of tokens with these places, and some that are not used."""
    lists = [
        (place, [token for token, of in enumerate(places) if of == place])
        for place in sorted(set(places) - {-1})
    ]
    rows = [
        (place, tokens[start : start + size])
        for place, tokens in lists
        for start in range(0, len(tokens), size)
    ] + [(-1, [])] * spare
    return AdapterChunks(
        torch.tensor([place for place, _ in rows], dtype=torch.int32, device=DEVICE),
        torch.tensor(
            [tokens + [-1] * (size - len(tokens)) for _, tokens in rows],
            dtype=torch.int32,
            device=DEVICE,
        ),
    )


def by_hand(
    out: torch.Tensor, x: torch.Tensor, places: Sequence[int], site: SiteWeights
) -> torch.Tensor:
    """Token by token, in float64."""
    want = out.double()
    for token, place in enumerate(places):
        if place < 0:
            continue
        for part, (first, end) in enumerate(itertools.pairwise(site.bounds)):
            rows = site.rank_rows[place, : int(site.ranks[place, part])].long()
            low = site.a[rows, part].double() @ x[token].double()
            delta = site.b[rows, first:end].double().t() @ low
            want[token, first:end] += float(site.scales[place, part]) * delta
    return want


def tokens_of(count: int, places: int) -> list[int]:
    """A place, or none, of each token."""
    return [(token * 7 + token // 3) % (places + 1) - 1 for token in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [MERGED, ALONE], ids=["merged", "alone"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 16), (7, 16), (40, 16), (70, 64), (300, 128)])
def test_products_equal_those_by_hand(
    case: Case, tokens: int, size: int, dtype: torch.dtype
) -> None:
    site, places = site_of(case, dtype), tokens_of(tokens, len(case.ranks))
    places[0] = 1
    x = draw(tokens, case.inputs + 5, dtype=dtype, seed=3)[:, : case.inputs]
    wider = draw(tokens, case.bounds[-1] + 3, dtype=dtype, seed=4)
    before, out = wider.clone(), wider[:, 1:-2]
    want = by_hand(out, x, places, site)
    KERNELS.add_adapters(out, x, chunks_of(places, size), site)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), want, atol=bound, rtol=bound)
    assert torch.equal(wider[:, [0, -2, -1]], before[:, [0, -2, -1]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("inputs", [200, 256, 700])
def test_products_of_normed_rows(inputs: int, tokens: int, dtype: torch.dtype) -> None:
    """In all kinds of loops; a single row's norm is part of them."""
    case = MERGED._replace(inputs=inputs)
    site, places = site_of(case, dtype), [1, -1, 3][:tokens]
    x, out = draw(tokens, inputs, dtype=dtype, seed=3) * 4, draw(tokens, 160, dtype=dtype, seed=4)
    weight = draw(inputs, seed=5) * 0.2 + 1
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 0.3) * weight
    want = by_hand(out, normed, places, site)
    KERNELS.add_adapters(out, x, chunks_of(places), site, norm=(weight, 0.3))
    torch.testing.assert_close(out.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_numbers_are_not_rounded_before_the_second_product(dtype: torch.dtype) -> None:
    """In 16 bits, 1 + 2⁻¹⁴ of a rank would be 1: what is left of a difference would be nothing."""
    case = Case(128, (0, 64), [[2]])
    for tokens in (1, 4):
        site = site_of(case, dtype)
        rows = site.rank_rows[0].long()
        site.a[rows], site.b[rows] = 0.0, 1.0
        site.a[rows[0], 0, :2] = torch.tensor([1.0, 2.0**-7], dtype=dtype)
        site.a[rows[1], 0, 0] = -1.0
        x = torch.zeros(tokens, 128, dtype=dtype, device=DEVICE)
        x[:, 0], x[:, 1] = 1.0, 2.0**-7
        out = torch.zeros(tokens, 64, dtype=dtype, device=DEVICE)
        KERNELS.add_adapters(out, x, chunks_of([0] * tokens), site)
        want = torch.full_like(out, 2.0**-14).float() * float(site.scales[0, 0])
        # Two numbers of bfloat16 hold 16 bits of 1 + 2⁻¹⁴: three of the difference.
        error = 2.0**-3 if dtype is torch.bfloat16 else 1e-2
        torch.testing.assert_close(out.float(), want, rtol=error, atol=0.0)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_rows_without_an_adapter_are_neither_read_nor_written(tokens: int) -> None:
    site, places = site_of(MERGED, torch.float16), [-1, 2, -1, 0] * 10
    places = places[1 : tokens + 1] if tokens == 1 else places[:tokens]
    x = draw(tokens, MERGED.inputs, dtype=torch.float16, seed=3)
    out = draw(tokens, 160, dtype=torch.float16, seed=4)
    plain = torch.tensor([place < 0 for place in places], device=DEVICE)
    x[plain], out[plain] = torch.nan, -0.0
    KERNELS.add_adapters(out, x, chunks_of(places), site)
    assert torch.equal(out[plain], torch.zeros_like(out[plain]))
    assert torch.signbit(out[plain]).all()
    assert not out.isnan().any()
    # Outputs of parts that an adapter does not have stay, too.
    other = torch.full_like(out, -0.0)
    KERNELS.add_adapters(other, x, chunks_of(places), site)
    third = [token for token, place in enumerate(places) if place == 2]
    assert torch.signbit(other[third, :128]).all()


@pytest.mark.parametrize("tokens", [4, 40, 70])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_an_adapter_that_is_not_finite_spoils_its_own_rows_only(tokens: int, poison: float) -> None:
    places = tokens_of(tokens, 4)
    x = draw(tokens, MERGED.inputs, dtype=torch.float16, seed=3)
    want = draw(tokens, 160, dtype=torch.float16, seed=4)
    out = want.clone()
    site = site_of(MERGED, torch.float16)
    KERNELS.add_adapters(want, x, chunks_of(places), site)
    rows = site.rank_rows[1].long()
    site.a[rows[:20]], site.b[rows[:20]] = poison, poison
    x[places.index(3)] = poison  # A row's own input, too.
    KERNELS.add_adapters(out, x, chunks_of(places), site)
    spared = [token for token, place in enumerate(places) if place != 1]
    spared.remove(places.index(3))
    assert torch.equal(out[spared], want[spared])
    assert not out[[token for token, place in enumerate(places) if place == 1]].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(12, 16), (40, 16), (150, 64)])
def test_a_row_is_the_same_in_any_company(
    tokens: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit: with other places, in other chunks and orders, alone in the step."""
    if not torch.cuda.is_available():
        sum_products_in_one_order(monkeypatch)
    case, places = MERGED, tokens_of(tokens, 4)
    x = draw(tokens, case.inputs, dtype=dtype, seed=3)
    base = draw(tokens, 160, dtype=dtype, seed=4)
    site, want = site_of(case, dtype), base.clone()
    KERNELS.add_adapters(want, x, chunks_of(places, size), site)

    # Chunks in another order, tokens anywhere in them, and more of them than needed.
    given = chunks_of(places, size, spare=5)
    generator = torch.Generator().manual_seed(6)
    order = torch.randperm(len(given.places), generator=generator)
    columns = torch.randperm(size, generator=generator)
    moved = AdapterChunks(given.places[order], given.tokens[order][:, columns].contiguous())
    out = base.clone()
    KERNELS.add_adapters(out, x, moved, site)
    assert torch.equal(out, want)

    # The same adapters at other places, whose rank rows are elsewhere.
    swap = [2, 3, 1, 0]
    turned = case._replace(ranks=[case.ranks[place] for place in swap])
    other = site_of(turned, dtype, seed=9)
    for mine, place in enumerate(swap):
        size_of = max(case.ranks[place])
        to, of = (one.rank_rows[at, :size_of].long() for one, at in ((other, mine), (site, place)))
        other.a[to], other.b[to] = site.a[of], site.b[of]
        other.scales[mine] = site.scales[place]
    out = base.clone()
    where = [-1 if place < 0 else swap.index(place) for place in places]
    KERNELS.add_adapters(out, x, chunks_of(where, size), other)
    assert torch.equal(out, want)

    # Of a step in which no other row has an adapter.
    for token in (1, tokens - 1):
        out = base.clone()
        only = [place if one == token else -1 for one, place in enumerate(places)]
        KERNELS.add_adapters(out, x, chunks_of(only, size), site)
        assert torch.equal(out[token], want[token])


def test_every_choice_of_tiles_gives_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops over inputs and ranks, splits that are uneven or too many, blocks beyond the lanes."""
    case = Case(400, (0, 48, 112), [[40, 7], [0, 33]])
    for tokens, size in ((1, 16), (9, 8)):
        site, places = site_of(case, torch.float32), ([0, 1, -1] * tokens)[:tokens]
        x, base = draw(tokens, 400, seed=3), draw(tokens, 112, seed=4)
        want = by_hand(base, x, places, site)
        for splits, lanes, block_k, outputs, ranks in (
            (1, 16, 16, 16, 16), (3, 64, 32, 128, 16), (99, 32, 64, 32, 32), (7, 16, 16, 64, 64),
        ):  # fmt: skip
            chosen = tiles.AdapterTiles(
                splits, lanes, block_k, 4, 2, outputs, ranks, 4, early=splits > 1
            )
            monkeypatch.setattr(tiles, "TILES", ((tokens, chosen),))
            out = base.clone()
            KERNELS.add_adapters(out, x, chunks_of(places, size), site)
            torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)


def test_pools_and_activations_of_two_types() -> None:
    """Adapters as they are stored, float32, beside activations of 16 bits."""
    site, places = site_of(MERGED, torch.float32), tokens_of(20, 4)
    x, out = draw(20, 200, dtype=torch.float16), draw(20, 160, dtype=torch.float16, seed=4)
    want = by_hand(out, x, places, site)
    KERNELS.add_adapters(out, x, chunks_of(places), site)
    torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=2e-3)


def test_a_step_without_chunks_or_ranks_stays_as_it_is() -> None:
    site = site_of(MERGED, torch.float32)
    out, x = draw(3, 160), draw(3, 200, seed=1)
    want = out.clone()
    KERNELS.add_adapters(out, x, chunks_of([-1] * 3), site)
    KERNELS.add_adapters(out, x, chunks_of([-1] * 3, spare=0), site)
    nothing = site_of(Case(200, (0, 96, 128, 160), [[0, 0, 0]] * 4), torch.float32)
    KERNELS.add_adapters(out, x, chunks_of([0, 1, 2]), nothing)
    assert torch.equal(out, want)


STEPS = {
    "one token": ([1], 0, 16, 1),
    "decode": ([1] * 64, 7, 16, 3),
    "every token another adapter": ([1] * 40, 0, 16, 64),
    "ragged": ([3, 0, 5, 1, 40, 2, 0], 4, 3, 3),
    "a prompt": ([700, 900, 0, 1, 1, 1000, 0], 30, 64, 3),
    "two sorted blocks, one adapter": ([1030, 1018], 0, 64, 1),
}


@pytest.mark.parametrize(("counts", "padding", "size", "places"), STEPS.values(), ids=STEPS)
def test_chunks_equal_their_reference(
    counts: list[int], padding: int, size: int, places: int
) -> None:
    generator = torch.Generator().manual_seed(len(counts))
    rows, num_slots = len(counts), len(counts) + 3
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    tokens = int(starts[-1]) + padding
    slots = torch.randperm(num_slots - 1, generator=generator)[:rows]
    slot_places = torch.randint(-1, places, (num_slots,), generator=generator).int()
    # A place is any number, and the last slot, padding's, has none.
    slot_places = torch.where(slot_places < 0, -1, slot_places * 50_000)
    slot_places[slots[0]], slot_places[-1] = 0, -1
    first = torch.randint(0, 60, (num_slots,), generator=generator)
    first[slots[0]] = 0
    positions = torch.randint(0, 90, (tokens,), generator=generator)
    tables = AdapterTables(slot_places.to(DEVICE), first.to(DEVICE))
    count = chunk_count(tokens, places, size)
    for kind in (torch.int32, torch.int64):
        given = [one.to(DEVICE) for one in (slots.to(kind), starts, positions)]
        want = REFERENCE.adapter_chunks(*given, tables, count, size)
        got = KERNELS.adapter_chunks(*given, tables, count, size)
        assert (want.places >= 0).any()
        assert got.places.dtype == got.tokens.dtype == torch.int32
        assert torch.equal(got.places, want.places)
        assert torch.equal(got.tokens, want.tokens)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU, nothing can happen between two loads")
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_chunks_that_are_made_late_are_waited_for(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first product's loads before the wait are repeated if the place was another one then."""
    case = MERGED._replace(inputs=256)
    site, places = site_of(case, torch.float16), [0, 3, -1, 2, 1] * 8
    x = draw(tokens, 256, dtype=torch.float16, seed=3)
    base = draw(tokens, 160, dtype=torch.float16, seed=4)
    chunks = chunks_of(places[:tokens])
    want = by_hand(base, x, places[:tokens], site)
    assert adapter_tiles(tokens).early
    for before in (-1, 2, 4, 2**31 - 1):
        late = chunks.places.clone().fill_(before)
        made = AdapterChunks(late, chunks.tokens)
        monkeypatch.setattr(shrink, "gdc_wait", lambda late=late: late.copy_(chunks.places))
        monkeypatch.setattr(shrink, "pdl_options", lambda device: {"launch_pdl": True})
        out = base.clone()
        KERNELS.add_adapters(out, x, made, site)
        torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=2e-3)

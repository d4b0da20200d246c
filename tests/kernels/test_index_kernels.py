"""Kernels of an indexer against their twins in torch."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.nn.latent import index_operations
from jackfield.core.nn.operations import Operations
from jackfield.core.protocols.latent_attention import ChosenTokens
from jackfield.kernels.indexer import index_choice as choosing
from jackfield.kernels.indexer.index_choice import choose_cached_tokens
from jackfield.kernels.indexer.index_scores import index_scores
from jackfield.plugins.operations import indexing
from jackfield.plugins.operations.triton import TritonOperations

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter cannot multiply bfloat16.
DTYPES = [torch.float32, torch.bfloat16 if CUDA else torch.float16]
HEADS, DIM, BLOCK = 5, 24, 4
MIXED = [(37, 1), (6, 1), (20, 20), (70, 18), (13, 1)]
"""Rows: their length, and how many of their tokens are the step's."""
DECODE = [(61, 1), (9, 1), (13, 1), (4500, 1)]


class Step(NamedTuple):
    query: torch.Tensor
    weights: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    positions: torch.Tensor


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small integers: their products and sums are exact, and many are equal."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def step(
    rows: list[tuple[int, int]], dtype: torch.dtype, padding: int = 0, size: int = DIM
) -> Step:
    """Rows in shuffled blocks of a cache that is NaN elsewhere; then rows without tokens, and
    tokens of no row, `padding` of each."""
    counts = [-(-length // BLOCK) for length, _ in rows]
    random = torch.Generator().manual_seed(1)
    free = (torch.randperm(sum(counts) + 3, generator=random) + 1).tolist()
    cache = torch.full((sum(counts) + 4, BLOCK, size), float("nan"))
    table = torch.zeros(len(rows) + padding, max(counts) + 1, dtype=torch.int32)
    for row, (length, _) in enumerate(rows):
        blocks = [free.pop() for _ in range(counts[row])]
        table[row, : len(blocks)] = torch.tensor(blocks)
        own = [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(length)]
        cache.flatten(0, 1)[own] = draw(length, size, seed=row)
    starts = torch.tensor([0, *(queries for _, queries in rows), *[0] * padding]).cumsum(0)
    positions = [torch.arange(length - queries, length) for length, queries in rows]
    positions.append(torch.zeros(padding, dtype=torch.int64))
    tokens = int(starts[-1]) + padding
    return Step(
        draw(tokens, HEADS, size, seed=50).to(DEVICE, dtype),
        draw(tokens, HEADS, seed=51).to(DEVICE),
        cache.to(DEVICE, dtype),
        table.to(DEVICE),
        starts.to(DEVICE, torch.int32),
        torch.cat(positions).to(DEVICE),
    )


def assert_equal(got: ChosenTokens, want: ChosenTokens, tokens: int) -> None:
    assert got.slots.dtype == got.counts.dtype == torch.int32
    assert torch.equal(got.counts[:tokens], want.counts[:tokens])
    assert torch.equal(got.slots[:tokens], want.slots[:tokens])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "padding"), [(MIXED, 0), (MIXED, 3), (DECODE, 3)], ids=["mixed", "padded", "decode"]
)
def test_tokens_are_chosen_as_by_their_twin(
    rows: list[tuple[int, int]], padding: int, dtype: torch.dtype
) -> None:
    """Equal scores, of which the earlier token stays; rows with fewer tokens than may stay."""
    made = step(rows, dtype, padding)
    tokens = sum(queries for _, queries in rows)
    for longest in (max(length for length, _ in rows), made.block_table.shape[1] * BLOCK):
        bounds = {"topk": 13, "max_seq_len": longest}
        want = Operations().choose_cached_tokens(*made, **bounds)
        assert_equal(TritonOperations().choose_cached_tokens(*made, **bounds), want, tokens)


@pytest.mark.parametrize("topk", [13, 40])
def test_tokens_of_divided_rows_are_chosen_as_by_their_twin(
    topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of all parts, of some with a last one of 8 scores, which are fewer than may stay, and
    rows of one part or no more than may stay; of 40, no part has fewer."""
    monkeypatch.setattr(choosing, "MAX_TILE", 16)
    monkeypatch.setattr(choosing, "LONG_ROW", 64)
    made = step([(369, 1), (200, 2), (41, 1), (16, 1), (9, 1)], torch.float32, padding=3)
    longest = made.block_table.shape[1] * BLOCK
    assert choosing.divides_rows(len(made.query), longest)
    want = Operations().choose_cached_tokens(*made, topk=topk, max_seq_len=longest)
    workspace = torch.full((4 * (384 + 16 * topk),), float("nan"), device=DEVICE)
    got = choose_cached_tokens(*made, topk=topk, max_seq_len=longest, workspace=workspace)
    assert_equal(ChosenTokens(*got), want, 6)


def test_the_twin_takes_tokens_alone_whose_products_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = step(MIXED, torch.float32)
    want = Operations().choose_cached_tokens(*made, topk=13, max_seq_len=70)
    monkeypatch.setattr(index_operations, "ELEMENTS", 1)
    got = Operations().choose_cached_tokens(*made, topk=13, max_seq_len=70)
    assert_equal(got, want, len(made.query))


def test_the_twin_is_a_sum_over_heads_of_what_is_positive() -> None:
    made = step([(40, 3)], torch.float32)
    chosen = Operations().choose_cached_tokens(*made, topk=9, max_seq_len=40)
    own = made.block_table[0, : 40 // BLOCK].long()
    keys = made.cache[own].flatten(0, 1)
    slots = (own[:, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)).flatten()
    for token, position in enumerate((37, 38, 39)):
        scores = []
        for place in range(position + 1):
            products = (made.query[token] * keys[place]).sum(1).clamp(min=0)
            scores.append(float((products * made.weights[token]).sum()))
        best = sorted(range(position + 1), key=lambda place: (-scores[place], place))[:9]
        assert chosen.slots[token].tolist() == slots[sorted(best)].tolist()


def test_scores_that_do_not_fit_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts begin and end inside of a row's tiles."""
    made = step(MIXED, torch.float32)
    bounds = {"topk": 13, "max_seq_len": 70}
    want = Operations().choose_cached_tokens(*made, **bounds)
    for rows in (6, 33):
        monkeypatch.setattr(indexing, "SCORES", 80 * rows + 79)
        assert_equal(
            TritonOperations().choose_cached_tokens(*made, **bounds), want, len(made.query)
        )
    with pytest.raises(ValueError, match="a query needs 80"):
        choose_cached_tokens(*made, **bounds, workspace=torch.empty(79, device=DEVICE))


def test_short_texts_are_not_scored() -> None:
    """A row of 50 tokens is, and only what its queries see."""
    made = step([(40, 40), (50, 50)], torch.float32)
    out = torch.full((90, 64), 7.5, device=DEVICE)
    index_scores(*made, topk=48, max_seq_len=50, first_token=0, out=out)
    assert (out[:40] == 7.5).all() and (out[:, 50:] == 7.5).all()
    assert (out[89, :50] != 7.5).all() and (out[88, 49:] == 7.5).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("chooses", [True, False], ids=["chooses", "keys alone"])
def test_keys_are_normed_rotated_and_cached(
    chooses: bool, interleaved: bool, dtype: torch.dtype
) -> None:
    rope, tokens = 6, 3
    random = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(DEVICE, dtype)

    query = normal(tokens, 11, DIM + 2)[..., :DIM] if chooses else None
    key = normal(tokens, DIM + 3)[:, :DIM]
    angles = torch.rand(40, rope // 2, generator=random) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE)
    rest = (
        normal(DIM), normal(DIM), 1e-6, torch.tensor([0, 7, 31], device=DEVICE), cos_sin,
    )  # fmt: skip
    slots = torch.tensor([5, 0, 17], device=DEVICE)
    caches = [torch.zeros(6, BLOCK, DIM, dtype=dtype, device=DEVICE) for _ in range(2)]
    results = [
        operations.cached_index_keys(
            None if query is None else query.clone(), key.clone(), *rest, cache, slots,
            interleaved=interleaved,
        )
        for operations, cache in zip((Operations(), TritonOperations()), caches, strict=True)
    ]  # fmt: skip
    bound = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(caches[1], caches[0], atol=bound, rtol=bound)
    if query is None:
        assert results == [None, None]
    else:
        torch.testing.assert_close(results[1], results[0], atol=bound, rtol=bound)
        assert torch.equal(results[1][..., rope:], query[..., rope:])

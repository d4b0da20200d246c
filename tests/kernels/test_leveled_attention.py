"""Attention over tokens in several levels in one launch, against softmax by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.cache.level_options import LevelFormat, level_format
from jackfield.core.nn.kv_cache.level_cache import LevelPart
from jackfield.kernels.attention.decode_splits import workspace_elements
from jackfield.kernels.attention.fused_decode_attention import fused_decode_attention
from jackfield.kernels.attention.leveled_attention import leveled_attention
from jackfield.kernels.attention.levels import LevelRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, KV_HEADS, GROUP = 4, 2, 3
QUERIES = (1, 1, 5, 1, 3)
"""Tokens of each row in the step."""
LEVELS = ((0, 0, 0), (37, 25, 9), (60, 0, 1), (9, 50, 0), (0, 13, 70))
"""Tokens of each row in each level."""
NEWEST = (6, 1, 9, 3, 22)
"""Tokens of each row as they were computed, those of the step included."""


class Case:
    """A cache with rows in it, and the tokens that each row has."""

    def __init__(self, bits: tuple[int, ...], head_dim: int, num_levels: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self.formats = [level_format(each, SIZE, head_dim, 4) for each in bits[:num_levels]]
        shape = (2, 140, SIZE, KV_HEADS, head_dim)
        # What no row has must not be read: NaN among numbers, and codes of any kind.
        self.cache = torch.full(shape, torch.nan)
        order = (torch.randperm(139, generator=draw) + 1).tolist()
        self.keys, self.values, tables, seq_lens = [], [], [], []
        for own, newest in zip(LEVELS, NEWEST, strict=True):
            table: list[int] = []
            found: tuple[list[torch.Tensor], ...] = ([], [])
            whole = LevelFormat(16, SIZE)
            for form, count in [*zip(self.formats, own, strict=False), (whole, newest)]:
                columns = -(-count // form.tokens)
                blocks = [order.pop() for _ in range(columns)]
                table += blocks
                numbers = torch.randn(2, count, KV_HEADS, head_dim, generator=draw)
                for part, tokens, kept in zip(self.cache, numbers, found, strict=True):
                    if count:
                        view = LevelPart.of(part, form)
                        places = torch.tensor(blocks)
                        view.write(tokens, places, 0)
                        kept.append(view.read(places, torch.float32)[:count])
            self.keys.append(torch.cat(found[0]))
            self.values.append(torch.cat(found[1]))
            columns = len(table) - -(-newest // SIZE)
            seq_lens.append(columns * SIZE + newest)
            tables.append(table)
        self.table = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
        for row, table in enumerate(tables):
            self.table[row, : len(table)] = torch.tensor(table)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        # Slots are not rows.
        self.slots = torch.tensor([4, 2, 0, 3, 1])
        self.levels = torch.zeros(6, num_levels, dtype=torch.int32)
        self.levels[self.slots] = torch.tensor(LEVELS, dtype=torch.int32)[:, :num_levels]
        self.starts = torch.tensor([0, *QUERIES]).cumsum(0).int()
        self.query = torch.randn(sum(QUERIES), KV_HEADS * GROUP, head_dim, generator=draw)

    def run(self, **options: object) -> torch.Tensor:
        sent = [
            part.to(DEVICE)
            for part in (self.query, self.cache, self.table, self.starts, self.seq_lens)
        ]
        return leveled_attention(
            *sent, self.levels.to(DEVICE), self.formats, self.slots.to(DEVICE), scale=0.3,
            **options,  # type: ignore[arg-type]
        ).cpu()  # fmt: skip

    def expected(self, soft_cap: float | None = None, sinks: torch.Tensor | None = None):
        rows = []
        for row, count in enumerate(QUERIES):
            keys, values = self.keys[row], self.values[row]
            for place in range(count):
                seen = len(keys) - count + place + 1
                query = self.query[int(self.starts[row]) + place]
                for head in range(KV_HEADS * GROUP):
                    own = keys[:seen, head // GROUP]
                    scores = 0.3 * own @ query[head]
                    if soft_cap is not None:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    if sinks is not None:
                        scores = torch.cat((scores, sinks[head, None]))
                    weights = scores.softmax(0)[:seen]
                    rows.append(weights @ values[:seen, head // GROUP])
        return torch.stack(rows).view(self.query.shape)


@pytest.mark.parametrize(
    "bits,head_dim,num_levels",
    [((8, 4, 16), 16, 3), ((8, 4), 32, 2), ((4,), 16, 1), ((8, 4, 4), 24, 3), ((16, 8), 16, 2)],
    ids=str,
)
def test_all_levels_are_read(bits: tuple[int, ...], head_dim: int, num_levels: int) -> None:
    case = Case(bits, head_dim, num_levels)
    out = case.run(max_query_len=5)
    assert (out - case.expected()).abs().max() < 1e-4


def test_sinks_and_a_soft_cap() -> None:
    case, sinks = Case((8, 4), 16, 2), torch.linspace(-1, 2, KV_HEADS * GROUP)
    out = case.run(max_query_len=5, soft_cap=2.0, sinks=sinks.to(DEVICE))
    assert (out - case.expected(2.0, sinks)).abs().max() < 1e-4


@pytest.mark.parametrize("num_splits", [2, 3, 40])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_of_one_token_in_splits(num_splits: int, with_sinks: bool) -> None:
    """More splits than tiles, too: some have nothing."""
    case = Case((8, 4, 4), 16, 3)
    sinks = torch.linspace(-1, 2, KV_HEADS * GROUP) if with_sinks else None
    given = {} if sinks is None else {"sinks": sinks.to(DEVICE)}
    out = case.run(max_query_len=1, num_splits=num_splits, num_rows=2, num_tokens=2, **given)
    assert (out[:2] - case.expected(None, sinks)[:2]).abs().max() < 1e-4


def test_rows_from_another_one_on_leave_those_before() -> None:
    case = Case((8, 4), 16, 2)
    out = torch.full_like(case.query, 7.0).to(DEVICE)
    case.run(max_query_len=5, first_row=2, num_tokens=9, out=out)
    assert (out[:2] == 7).all()
    assert (out[2:].cpu() - case.expected()[2:]).abs().max() < 1e-4


@pytest.mark.parametrize("bits", [8, 4])
def test_a_level_s_block_has_its_tokens_and_no_other_s_bytes(bits: int) -> None:
    """Written in two pieces, at the end of a block and the beginning of the next."""
    draw = torch.Generator().manual_seed(5)
    form = level_format(bits, SIZE, 16, 4)
    part = torch.zeros(6, SIZE, KV_HEADS, 16)
    numbers = torch.randn(form.tokens + 3, KV_HEADS, 16, generator=draw)
    view, blocks = LevelPart.of(part, form), torch.tensor([4, 2])
    view.write(numbers[:5], blocks, 0)
    view.write(numbers[5:], blocks, 5)
    found = view.read(blocks, torch.float32)[: len(numbers)]
    # A step is the head's span over the number of codes; rounding to bfloat16 adds little.
    steps = (numbers.amax(-1) - numbers.amin(-1)) / (254 if bits == 8 else 15)
    assert ((found - numbers).abs().amax(-1) <= 0.52 * steps + 0.01).all()
    untouched = torch.tensor([0, 1, 3, 5])
    assert not part[untouched].any() and part[blocks].any()


@pytest.mark.parametrize("num_splits", [1, 2, 7])
@pytest.mark.parametrize(
    "bits,head_dim,group,rows",
    [((8, 4, 16), 16, GROUP, range(5)), ((8, 4), 32, 1, [1]), ((4,), 24, GROUP, [2])],
    ids=str,
)
def test_a_decode_step_in_one_launch(
    bits: tuple[int, ...], head_dim: int, group: int, rows: Sequence[int], num_splits: int
) -> None:
    """From the projection, whose token goes to the cache; a row alone may give it a program."""
    case, own = Case(bits, head_dim, len(bits)), list(rows)
    count, heads = len(own), KV_HEADS * group
    last = case.seq_lens[own].long() - 1
    slots = case.table[own, last // SIZE].long() * SIZE + last % SIZE
    cache = case.cache.clone()
    cache[:, slots // SIZE, slots % SIZE] = torch.nan
    query = case.query[case.starts[own].long()].view(count, KV_HEADS, GROUP, head_dim)
    query = query[:, :, :group].reshape(count, -1)
    new = [torch.stack([part[row][-1] for row in own]) for part in (case.keys, case.values)]
    qkv = torch.cat((query, *(part.flatten(1) for part in new)), dim=1).to(DEVICE)
    levels = LevelRows(case.levels.to(DEVICE), tuple(case.formats), case.slots[own].to(DEVICE))
    counters = torch.zeros(count * KV_HEADS, dtype=torch.int32, device=DEVICE)
    workspace = torch.empty(workspace_elements(count, heads, head_dim, num_splits), device=DEVICE)
    sent = cache.to(DEVICE)
    out = fused_decode_attention(
        qkv, heads, KV_HEADS, sent, case.table[own].to(DEVICE), case.seq_lens[own].to(DEVICE),
        slots.to(DEVICE), scale=0.3, counters=counters, workspace=workspace,
        num_splits=num_splits, levels=levels,
    )  # fmt: skip
    assert not counters.any()
    torch.testing.assert_close(sent.cpu(), case.cache, atol=0, rtol=0, equal_nan=True)
    for place, row in enumerate(own):
        for head in range(heads):
            wanted, kv_head = query.view(count, heads, head_dim)[place, head], head // group
            weights = (0.3 * case.keys[row][:, kv_head] @ wanted).softmax(0)
            expected = weights @ case.values[row][:, kv_head]
            assert (out[place, head].cpu() - expected).abs().max() < 1e-4

"""Checks of caches whose older tokens are in levels, for `AttentionBackendKit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ...core.cache.level_options import LevelFormat, level_format
from ...core.nn.context import BatchLayout, CacheLevels
from ...core.nn.kv_cache.level_cache import LevelPart
from .attention_cases import BATCHES, make_spec
from .paged import Batch, Row, dense_attention, make_batch


def leveled_rows(
    layout: BatchLayout,
    parts: Sequence[torch.Tensor],
    rows: Sequence[Sequence[torch.Tensor]],
    formats: Sequence[LevelFormat],
) -> tuple[BatchLayout, list[torch.Tensor], list[list[torch.Tensor]]]:
    """Move the older half of each row's cached blocks to levels, in equal parts. Return the layout,
    the caches and what is left of rows.

    parts: [num_blocks, block_size, num_heads, width] each; rows: of each part, [tokens, num_heads,
    width]
    """
    device, size, first = parts[0].device, parts[0].shape[1], parts[0].shape[0]
    caches = [
        torch.cat((part, torch.full_like(part[:1], float("nan")).expand(200, -1, -1, -1)))
        for part in parts
    ]  # fmt: skip
    queries = np.diff(layout.query_start_cpu).tolist()
    tables, left, counts, lengths = [], [], [], []
    for number, row in enumerate(rows):
        length = len(row[0])
        columns = (length - queries[number]) // size // 2
        table: list[int] = []
        numbers = [part.clone() for part in row]
        pieces = torch.arange(columns * size).tensor_split(len(formats))
        for form, places in zip(formats, pieces, strict=True):
            new = list(range(first, first + -(-len(places) // form.tokens)))
            table, first = table + new, first + len(new)
            blocks = torch.tensor(new, device=device)
            for own, cache in zip(numbers, caches, strict=True):
                if new:
                    view = LevelPart.of(cache, form)
                    view.write(own[places], blocks, 0)
                    own[places] = view.read(blocks, own.dtype)[: len(places)]
        old = layout.block_table[number, columns : -(-length // size)].tolist()
        lengths.append(len(table) * size + length - columns * size)
        tables.append([*table, *old])
        left.append(numbers)
        counts.append(
            [len(each) for each in torch.arange(columns * size).tensor_split(len(formats))]
        )
    table_of_rows = torch.zeros(len(rows), max(map(len, tables)) + 2, dtype=torch.int32)
    for number, table in enumerate(tables):
        table_of_rows[number, : len(table)] = torch.tensor(table)
    slots = torch.arange(len(rows)).flip(0)
    tokens = torch.zeros(len(rows) + 1, len(formats), dtype=torch.int32)
    tokens[slots] = torch.tensor(counts, dtype=torch.int32)
    lengths_cpu = np.array(lengths, dtype=np.int32)
    moved = replace(
        layout, block_table=table_of_rows.to(device), seq_lens_cpu=lengths_cpu,
        seq_lens=torch.from_numpy(lengths_cpu.copy()).to(device), slots=slots.to(device),
        max_seq_len=int(lengths_cpu.max()),
        levels=CacheLevels(tuple(formats), tokens.to(device)),
    )  # fmt: skip
    return moved, caches, left


def leveled(batch: Batch, formats: Sequence[LevelFormat]) -> Batch:
    """Return the batch with tokens in levels: rows have what is left of their keys and values."""
    rows = [(row.key, row.value) for row in batch.rows]
    layout, caches, left = leveled_rows(batch.layout, batch.cache.unbind(), rows, formats)
    own = [Row(row.query, *kept) for row, kept in zip(batch.rows, left, strict=True)]
    return replace(batch, rows=own, layout=layout, cache=torch.stack(caches))


class LevelChecks:
    """Part of `AttentionBackendKit`."""

    assert_near: Any
    attend: Any
    backend_class: Any
    device: Any
    make: Any
    name: Any
    sinks: Any

    @pytest.mark.parametrize(
        ("batch", "features"),
        [*((batch, {}) for batch in BATCHES), ("decode", {"sinks": True}),
         ("mixed", {"soft_cap": 4.0})],
        ids=lambda case: case if isinstance(case, str) else "+".join(case) or "plain",
    )  # fmt: skip
    def test_tokens_in_levels(
        self, batch: str, features: dict[str, Any], dtype: torch.dtype
    ) -> None:
        """If it claims a `leveled_cache`: all queries of a row see its tokens in levels, and those
        after them as ever; other layers of the step have none."""
        if not getattr(self.backend_class, "leveled_cache", False):
            pytest.skip(f"{self.name} does not claim a leveled_cache")
        spec = make_spec((4, 2, 64, 4), **features)
        backend = self.make(spec, dtype, 4)
        plain = make_batch(BATCHES[batch], spec, 4, self.device, dtype)
        formats = [level_format(bits, 4, 64, dtype.itemsize) for bits in (16, 8, 4)]
        moved = leveled(plain, formats)
        expected = dense_attention(spec, moved.rows, self.sinks(spec))
        self.assert_near(self.attend(backend, spec, moved), expected, dtype, times=2)

    def test_a_window_has_no_levels(self) -> None:
        if not getattr(self.backend_class, "leveled_cache", False):
            pytest.skip(f"{self.name} does not claim a leveled_cache")
        spec = make_spec((4, 2, 64, 4), sliding_window=6)
        backend = self.make(spec, torch.float32, 4)
        plain = make_batch(BATCHES["decode"], spec, 4, self.device, torch.float32)
        tokens = torch.full((9, 1), 7, dtype=torch.int32, device=self.device)
        slots = torch.arange(len(plain.rows), device=self.device)
        levels = CacheLevels((level_format(8, 4, 64, 4),), tokens)
        layout = replace(plain.layout, slots=slots, levels=levels)
        actual = self.attend(backend, spec, replace(plain, layout=layout))
        self.assert_near(actual, dense_attention(spec, plain.rows), torch.float32)

"""Checks of caches whose older tokens are in levels, for `AttentionBackendKit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ...core.cache.level_options import LevelFormat, level_format
from ...core.nn.context import CacheLevels
from ...core.nn.kv_cache.level_cache import LevelPart
from .attention_cases import BATCHES, make_spec
from .paged import Batch, Row, dense_attention, make_batch


def leveled(batch: Batch, formats: Sequence[LevelFormat]) -> Batch:
    """Return the batch with the older half of each row's cached blocks in levels, in equal parts:
    rows have what is left of their keys and values."""
    layout, (_, _, size, heads, dim) = batch.layout, batch.cache.shape
    device, first = batch.cache.device, batch.cache.shape[1]
    more = torch.full((2, 200, size, heads, dim), float("nan"), dtype=batch.cache.dtype)
    cache = torch.cat((batch.cache, more.to(device)), dim=1)
    tables, rows, counts, lengths = [], [], [], []
    for number, row in enumerate(batch.rows):
        columns = (len(row.key) - len(row.query)) // size // 2
        table: list[int] = []
        key, value = row.key.clone(), row.value.clone()
        parts = torch.arange(columns * size).tensor_split(len(formats))
        for form, places in zip(formats, parts, strict=True):
            new = list(range(first, first + -(-len(places) // form.tokens)))
            table, first = table + new, first + len(new)
            blocks = torch.tensor(new, device=device)
            for numbers, part in zip((key, value), cache, strict=True):
                if new:
                    view = LevelPart.of(part, form)
                    view.write(numbers[places], blocks, 0)
                    numbers[places] = view.read(blocks, numbers.dtype)[: len(places)]
        old = layout.block_table[number, columns : -(-len(row.key) // size)].tolist()
        lengths.append(len(table) * size + len(row.key) - columns * size)
        tables.append([*table, *old])
        rows.append(Row(row.query, key, value))
        counts.append([len(places) for places in parts])
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
    return replace(batch, rows=rows, layout=moved, cache=cache)


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

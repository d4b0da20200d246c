"""Checks of caches in other formats, and of the null block, for `AttentionBackendKit`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from ...core.cache.formats import QUANTIZED_FORMATS
from .attention_cases import (
    BATCHES,
    QuantizedLayer,
    assert_same,
    make_spec,
    run_layer,
    write,
)
from .paged import Row, dense_attention, make_batch, make_layout


class CacheChecks:
    """Part of `AttentionBackendKit`."""

    assert_near: Any
    attend: Any
    backend_class: Any
    device: Any
    make: Any
    name: Any
    sinks: Any

    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
    def test_fp8_cache(self, batch: str, kind: str, dtype: torch.dtype) -> None:
        """Numbers in the cache are divided by the layer's scales.

        fp8 represents all keys and values exactly, so nothing depends on rounding.
        """
        if not getattr(self.backend_class, "fp8_cache", False):
            pytest.skip(f"{self.name} does not claim to read an fp8_cache")
        scales = (2.0**-5, 2.0**-4)
        fields = dict(zip(("key_scale", "value_scale"), scales, strict=True))
        spec = msgspec.structs.replace(make_spec((4, 2, 64, 16)), **fields)
        backend = self.make(spec, dtype, 16)
        paged = make_batch(BATCHES[batch], spec, 16, self.device, dtype)
        fp8 = getattr(torch, kind)
        for row in paged.rows:
            for part, scale in zip((row.key, row.value), scales, strict=True):
                part.copy_((part.float() / scale).to(fp8).float() * scale)
        qkv = torch.cat([paged.joined(p).flatten(1) for p in ("query", "key", "value")], dim=1)
        by = torch.tensor(scales, device=self.device)[:, None, None, None, None]
        cached = replace(paged, cache=(paged.cache.float() / by).to(fp8))
        before = cached.cache.view(torch.uint8).clone()
        actual = run_layer(backend, spec, cached, qkv, None, (None, None))
        self.assert_near(actual, dense_attention(spec, paged.rows).flatten(1), dtype, times=2)
        untouched = torch.ones(before.flatten(1, 2).shape[1], dtype=torch.bool, device=self.device)
        untouched[paged.layout.slot_mapping] = False
        after = cached.cache.view(torch.uint8)
        assert torch.equal(after.flatten(1, 2)[:, untouched], before.flatten(1, 2)[:, untouched])
        for part, name, scale in zip(cached.cache.float(), ("key", "value"), scales, strict=True):
            new = part.flatten(0, 1)[paged.layout.slot_mapping] * scale
            assert torch.equal(new, paged.joined(name).float())

    @pytest.mark.parametrize(
        ("batch", "features"),
        [*((batch, {}) for batch in BATCHES), ("mixed", {"sliding_window": 24, "soft_cap": 4.0}),
         ("mixed", {"attention_chunk_size": 19}), ("decode", {"attention_chunk_size": 19}),
         ("decode", {"sinks": True})],
        ids=lambda case: case if isinstance(case, str) else "+".join(case) or "plain",
    )  # fmt: skip
    @pytest.mark.parametrize("name", QUANTIZED_FORMATS)
    def test_quantized_cache(
        self, name: str, batch: str, features: dict[str, Any], dtype: torch.dtype
    ) -> None:
        """Codes are read with the scale and the zero of their token and head."""
        if name not in self.backend_class.cache_formats:
            pytest.skip(f"{self.name} does not claim to read {name}")
        spec = make_spec((4, 2, 64, 16), **features)
        backend = self.make(spec, dtype, 16)
        paged = make_batch(BATCHES[batch], spec, 16, self.device, dtype)
        quantized = QuantizedLayer(spec, paged, name, dtype)
        actual = quantized.run(backend, self.sinks(spec))
        expected = dense_attention(spec, quantized.rows, self.sinks(spec)).flatten(1)
        self.assert_near(actual, expected, dtype, times=2)
        quantized.check_cache()

    def test_padding_rows_touch_the_null_block_alone(self, dtype: torch.dtype) -> None:
        """A decode step is padded with rows of one token in block 0, all in the same slot."""
        spec = make_spec((4, 2, 64, 16))
        backend = self.make(spec, dtype, 16)
        batch = make_batch([(30, 1), (17, 1)], spec, 16, self.device, dtype)
        padding = 3
        table = torch.zeros(2 + padding, batch.layout.block_table.shape[1], dtype=torch.int32)
        table[:2] = batch.layout.block_table
        slots = torch.zeros(2 + padding, dtype=torch.int64)
        slots[:2] = batch.layout.slot_mapping
        junk = [
            Row(*(torch.ones(1, heads, 64, dtype=dtype, device=self.device) for heads in (4, 2, 2)))
            for _ in range(padding)
        ]
        layout = make_layout([(30, 1), (17, 1), *[(1, 1)] * padding], table, slots, self.device)
        padded = replace(batch, rows=batch.rows + junk, layout=layout)
        expected = dense_attention(spec, batch.rows)
        before = batch.cache.clone()
        actual = self.attend(backend, spec, padded)
        self.assert_near(actual[:2], expected, dtype)
        if backend.standard_cache:
            write(before, layout, padded.joined("key"), padded.joined("value"))
        assert_same(padded.cache[:, 1:], before[:, 1:])

    def test_warm_up_on_the_null_block(self) -> None:
        """At start a step runs in which every token goes to slot 0; its result is discarded."""
        spec = make_spec((4, 2, 64, 16))
        backend = self.make(spec, torch.float32, 16)
        for sizes in ([(40, 40)], [(1, 1)], [(4, 4), (3, 3)]):
            batch = make_batch(sizes, spec, 16, self.device, torch.float32)
            before = batch.cache.clone()
            table = torch.zeros(len(sizes), 3, dtype=torch.int32)
            slots = torch.zeros(batch.layout.num_tokens, dtype=torch.int64)
            warm = replace(batch, layout=make_layout(sizes, table, slots, self.device))
            actual = self.attend(backend, spec, warm)
            assert actual.shape == (warm.layout.num_tokens, 4, 64)
            assert_same(warm.cache[:, 1:], before[:, 1:])

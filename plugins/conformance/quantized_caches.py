"""Checks of what operations write to a quantized KV cache, for `OperationsKit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from ...core.cache.formats import QUANTIZED_FORMATS
from ...core.nn.kv_cache.quantized_cache import (
    QuantizedCache,
    read_keys,
    read_values,
    token_parts,
)
from ...core.nn.operations import HeadLayout
from .operation_arguments import REFERENCE


class QuantizedCacheChecks:
    """Part of `OperationsKit`."""

    device: Any
    make: Any
    name: Any
    projection: Any
    tolerance: ClassVar[Mapping[torch.dtype, float]]

    @pytest.mark.parametrize("case", ["plain", "partly rotated", "both"])
    @pytest.mark.parametrize("name", QUANTIZED_FORMATS)
    def test_cached_heads_in_integers(self, name: str, case: str, dtype: torch.dtype) -> None:
        """If it claims `quantized`: what is read is no further from keys and values than half a
        step of the head's range, and nothing else of the cache changes."""
        operations, layout = self.make(dtype), HeadLayout(4, 2, 64)
        if not {"cached_heads.quantized", "write_cache.quantized"} <= operations.features:
            pytest.skip(f"{self.name} does not claim to write quantized caches")
        form, slots = QUANTIZED_FORMATS[name], torch.tensor([9, 3, 30, 31, 0], device=self.device)
        parts = {
            part.name: torch.full(
                (part.count, 4, 8, *part.shape), 7, dtype=getattr(torch, part.dtype),
                device=self.device,
            )
            for part in form.parts(2, 64)
        }  # fmt: skip
        empty = QuantizedCache.of(parts)
        caches = [QuantizedCache(*(part.clone() for part in empty)) for _ in range(2)]
        qkv, *rest = self.projection(layout, 5, case, dtype)
        _, key, value = operations.cached_heads(qkv.clone(), layout, *rest, caches[0], slots)
        _, *expected = REFERENCE.heads(qkv.clone(), layout, *rest)
        operations.write_cache(key.clone(), value.clone(), caches[1], slots)
        others = torch.tensor([n for n in range(32) if n not in slots.tolist()])
        for cache in caches:
            for part, old in zip(
                token_parts(cache).values(), token_parts(empty).values(), strict=True
            ):
                same = (part == old)[:, others // 8, others % 8]
                assert same.all(), "slots of others were written"
            blocks = torch.arange(4, device=self.device)
            for read, x, steps in zip(
                (read_keys, read_values), expected, (form.key_bits, form.value_bits), strict=True
            ):
                got = read(cache, blocks, torch.float32, 1.0).flatten(0, 1)[slots]
                wide = x.float()
                step = (wide.amax(-1) - wide.amin(-1)) / (254 if steps == 8 else 15)
                bound = 0.52 * step + 4 * self.tolerance[dtype] * (1 + wide.abs().amax(-1))
                assert ((got - wide).abs().amax(-1) <= bound).all()

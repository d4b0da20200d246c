"""Attention over caches of at most one byte per number; others are in kernel_cases.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ....core.cache.formats import QUANTIZED_FORMATS
from ....core.nn.kv_cache.quantized_cache import QuantizedCache
from ....kernels.attention.decode_splits import choose_num_splits, workspace_elements
from ....kernels.attention.fused_decode_attention import fused_decode_attention
from ....kernels.attention.paged_attention_decode import paged_attention_decode
from ....kernels.attention.paged_attention_prefill import paged_attention_prefill
from ....kernels.attention.qk_norm_rope_cache import qk_norm_rope_cache
from ....kernels.attention.quantized_tiles import Quantized
from .case import BLOCK_SIZE, Case, Maker, Work

Cache = torch.Tensor | Quantized
FORMATS = ("auto", "fp8", *QUANTIZED_FORMATS)
WORD = 0x3C003D00
"""Zero 0.0078, scale 0.031."""


class CacheShapes(NamedTuple):
    """An attention layer and its measured (rows, tokens of each)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    decode: tuple[tuple[int, int], ...]
    fused: tuple[tuple[int, int], ...]
    prompt: int
    """Tokens of a prompt, whose writes are also measured."""


QWEN3_8B_CACHE = CacheShapes(32, 8, 128, ((256, 2048), (32, 32768)), ((8, 4096), (8, 32768)), 8192)
TINY_CACHE = CacheShapes(4, 2, 16, ((2, 33),), ((2, 20),), 17)


def cache_cases(shapes: CacheShapes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    for name in FORMATS:
        maker = _Maker(shapes, device, dtype, name)
        for rows, context in shapes.decode:
            yield maker.decode(rows, context)
        for rows, context in shapes.fused:
            yield maker.fused_decode(rows, context)
        yield maker.prefill(1, shapes.prompt)
        yield maker.write()


class _Maker(Maker):
    def __init__(
        self, shapes: CacheShapes, device: torch.device, dtype: torch.dtype, name: str
    ) -> None:
        super().__init__(device, dtype)
        self.shapes, self.name = shapes, name
        self.label = str(dtype).removeprefix("torch.") if name == "auto" else name
        self.scale = 1 / math.sqrt(shapes.head_dim)

    @property
    def token_bytes(self) -> float:
        s = self.shapes
        if self.name in QUANTIZED_FORMATS:
            form = QUANTIZED_FORMATS[self.name]
            bits = form.key_bits + form.value_bits
            return s.num_kv_heads * (s.head_dim * bits / 8 + 2 * 4)
        item = 1 if self.name == "fp8" else self.dtype.itemsize
        return 2.0 * s.num_kv_heads * s.head_dim * item

    def cache(self, num_blocks: int) -> Cache:
        s = self.shapes
        if self.name not in QUANTIZED_FORMATS:
            kind = torch.float8_e4m3fn if self.name == "fp8" else self.dtype
            shape = (2, num_blocks, BLOCK_SIZE, s.num_kv_heads, s.head_dim)
            cache = torch.empty(shape, dtype=kind, device=self.device)
            for block in range(0, num_blocks, 4096):  # The random numbers are of more bytes.
                part = cache[:, block : block + 4096]
                part.copy_(torch.randn(part.shape, device=self.device, dtype=self.dtype))
            return cache
        parts = {}
        for spec in QUANTIZED_FORMATS[self.name].parts(s.num_kv_heads, s.head_dim):
            sizes = (spec.count, num_blocks, BLOCK_SIZE, *spec.shape)
            kind = getattr(torch, spec.dtype)
            if spec.name == "scales":
                parts[spec.name] = torch.full(sizes, WORD, dtype=kind, device=self.device)
            else:
                low, high = (-127, 128) if kind == torch.int8 else (0, 256)
                parts[spec.name] = torch.randint(low, high, sizes, dtype=kind, device=self.device)
        return QuantizedCache.of(parts)

    def paged(self, rows: int, context: int) -> tuple[Cache, torch.Tensor, torch.Tensor]:
        """Return cache, block tables (blocks in random order) and lengths."""
        table = self.block_table(rows, context)
        lengths = torch.full((rows,), context, dtype=torch.int32, device=self.device)
        return self.cache(table.numel()), table, lengths

    def num_splits(self, rows: int, context: int) -> int:
        """Return the backend's choice."""
        s = self.shapes
        return choose_num_splits(
            rows, s.num_kv_heads, s.head_dim, self.dtype, context, self.num_sms,
            narrow=self.name != "auto",
        )  # fmt: skip

    def workspace(self, rows: int, num_splits: int) -> torch.Tensor:
        s = self.shapes
        floats = workspace_elements(rows, s.num_heads, s.head_dim, num_splits)
        return torch.empty(floats, device=self.device)

    def decode(self, rows: int, context: int) -> Case:
        s = self.shapes

        def make() -> Work:
            cache, table, lengths = self.paged(rows, context)
            query = self.random(rows, s.num_heads, s.head_dim)
            splits = self.num_splits(rows, context)
            workspace = self.workspace(rows, splits)
            return lambda: paged_attention_decode(
                query, cache, table, lengths, scale=self.scale, num_splits=splits,
                workspace=workspace,
            )  # fmt: skip

        moved = 2 * s.num_heads * s.head_dim * self.dtype.itemsize + context * self.token_bytes
        shape = f"{rows} rows of {context}, {self.label}"
        return Case("paged_attention_decode", shape, rows * moved, make)

    def fused_decode(self, rows: int, context: int) -> Case:
        s = self.shapes
        width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim

        def make() -> Work:
            cache, table, lengths = self.paged(rows, context)
            qkv = self.random(rows, width)
            splits = self.num_splits(rows, context)
            workspace = self.workspace(rows, splits)
            counters = torch.zeros(rows * s.num_kv_heads, dtype=torch.int32, device=self.device)
            last = table[:, (context - 1) // BLOCK_SIZE].long()
            slots = last * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
            cos_sin = torch.randn(context, s.head_dim, device=self.device)
            return lambda: fused_decode_attention(
                qkv, s.num_heads, s.num_kv_heads, cache, table, lengths, slots, scale=self.scale,
                counters=counters, workspace=workspace, num_splits=splits, cos_sin=cos_sin,
            )  # fmt: skip

        moved = (width + s.num_heads * s.head_dim) * self.dtype.itemsize
        shape = f"{rows} rows of {context}, {self.label}"
        return Case(
            "fused_decode_attention", shape, rows * (moved + context * self.token_bytes), make
        )

    def prefill(self, rows: int, prompt: int) -> Case:
        s = self.shapes

        def make() -> Work:
            cache, table, lengths = self.paged(rows, prompt)
            query = self.random(rows * prompt, s.num_heads, s.head_dim)
            starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device) * prompt
            return lambda: paged_attention_prefill(
                query, cache, table, starts, lengths, scale=self.scale, max_query_len=prompt,
            )  # fmt: skip

        moved = prompt * (self.token_bytes + 2 * s.num_heads * s.head_dim * self.dtype.itemsize)
        flops = 2.0 * s.num_heads * s.head_dim * prompt * (prompt + 1)
        shape = f"{rows} row{'s' if rows > 1 else ''} of {prompt}, {self.label}"
        return Case("paged_attention_prefill", shape, rows * moved, make, rows * flops)

    def write(self) -> Case:
        s, tokens = self.shapes, self.shapes.prompt
        width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim

        def make() -> Work:
            qkv = self.random(tokens, width)
            positions = torch.arange(tokens, device=self.device)
            cos_sin = torch.randn(tokens, s.head_dim, device=self.device)
            cache = self.cache(-(-tokens // BLOCK_SIZE))
            return lambda: qk_norm_rope_cache(
                qkv, s.num_heads, s.num_kv_heads, positions, cos_sin, kv_cache=cache,
                slot_mapping=positions,
            )  # fmt: skip

        heads = (s.num_heads + s.num_kv_heads) * s.head_dim
        moved = tokens * ((width + heads) * self.dtype.itemsize + s.head_dim * 4 + self.token_bytes)
        return Case("qk_norm_rope_cache", f"{tokens} x {width}, {self.label}", moved, make)

"""Kernels of latent attention, at DeepSeek-V2-Lite's and V3's shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ....kernels.attention.latent.head_matmul import head_matmul
from ....kernels.attention.latent.latent_context import latent_context
from ....kernels.attention.latent.latent_decode import (
    choose_latent_splits,
    latent_decode,
    latent_workspace,
)
from ....kernels.attention.latent.latent_inputs import latent_inputs
from ....kernels.attention.latent.latent_prompt import latent_prompt
from .case import BLOCK_SIZE, Case, Maker, Work


class Latents(NamedTuple):
    name: str
    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    decode: tuple[tuple[int, int], ...]
    """(rows, context)"""
    prompts: tuple[tuple[int, int, int], ...]
    """(rows, tokens, context)"""

    @property
    def cache_dim(self) -> int:
        return self.latent_dim + self.rope_dim


LITE = Latents(
    "V2-Lite", 16, 512, 64, 128, 128, ((1, 1024), (64, 1024), (16, 16384)),
    ((1, 4096, 0), (1, 2048, 2048), (8, 512, 4096)),
)  # fmt: skip
V3 = Latents("V3", 128, 512, 64, 128, 128, ((1, 4096), (64, 4096)), ((1, 4096, 0), (1, 512, 8192)))
TINY_LATENTS = (Latents("tiny", 3, 24, 8, 12, 10, ((2, 33),), ((2, 9, 16),)),)
MEASURED = (LITE, V3)


def latent_cases(
    layers: tuple[Latents, ...], device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    for layer in layers:
        maker = _Maker(layer, device, dtype)
        for rows, context in layer.decode:
            yield maker.inputs(rows)
            yield from maker.products(rows)
            yield maker.decode(rows, context)
        for rows, tokens, context in layer.prompts:
            if context:
                yield maker.context(rows, tokens, context)
            yield maker.prompt(rows, tokens)


class _Maker(Maker):
    def __init__(self, layer: Latents, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.layer = layer
        self.scale = 1 / math.sqrt(layer.nope_dim + layer.rope_dim)

    def paged(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return cache, block tables (blocks in random order) and lengths."""
        table = self.block_table(rows, length)
        cache = self.random(table.numel(), BLOCK_SIZE, self.layer.cache_dim)
        lengths = torch.full((rows,), length, dtype=torch.int32, device=self.device)
        return cache, table, lengths

    def case(
        self, kernel: str, shape: str, elements: float, make: Callable[[], Work], flops: float = 0.0
    ) -> Case:
        return Case(kernel, f"{self.layer.name}: {shape}", elements * self.item, make, flops)

    def inputs(self, rows: int) -> Case:
        layer = self.layer
        key_dim = layer.nope_dim + layer.rope_dim

        def make() -> Work:
            query = self.random(rows, layer.num_heads, key_dim)
            latent, weight = self.random(rows, layer.cache_dim), self.random(layer.latent_dim)
            slots = torch.arange(rows, device=self.device)
            cos_sin = torch.randn(rows, layer.rope_dim, device=self.device)
            cache = self.random(-(-rows // BLOCK_SIZE), BLOCK_SIZE, layer.cache_dim)
            return lambda: latent_inputs(
                query, latent, weight, 1e-6, slots, cos_sin, cache, slots, interleaved=True
            )

        moved = rows * (3 * layer.cache_dim + 2 * layer.num_heads * layer.rope_dim)
        return self.case("latent_inputs", f"{rows} tokens", moved, make)

    def products(self, rows: int) -> Iterator[Case]:
        layer, heads = self.layer, self.layer.num_heads
        nope, value, latent = layer.nope_dim, layer.value_dim, layer.latent_dim

        def absorb() -> Work:
            query, up = self.random(rows, heads, nope), self.random(heads, nope + value, latent)
            return lambda: head_matmul(query, up[:, :nope])

        def values() -> Work:
            sums, up = self.random(rows, heads, latent), self.random(heads, nope + value, latent)
            return lambda: head_matmul(sums, up[:, nope:].mT)

        for name, size, make in (("absorb", nope, absorb), ("values", value, values)):
            moved = heads * latent * size + rows * heads * (latent + size)
            flops = 2.0 * rows * heads * latent * size
            yield self.case("head_matmul", f"{name}, {rows} tokens", moved, make, flops)

    def decode(self, rows: int, context: int) -> Case:
        layer, heads = self.layer, self.layer.num_heads

        def make() -> Work:
            cache, table, lengths = self.paged(rows, context)
            absorbed = self.random(rows, heads, layer.latent_dim)
            turned = self.random(rows, heads, layer.rope_dim)
            splits = choose_latent_splits(
                rows, heads, layer.latent_dim, self.dtype, context, self.num_sms
            )
            floats = latent_workspace(rows, heads, layer.latent_dim, splits)
            workspace = torch.empty(floats, device=self.device)
            return lambda: latent_decode(
                absorbed, turned, cache, table, lengths, scale=self.scale, num_splits=splits,
                workspace=workspace,
            )  # fmt: skip

        moved = rows * (context * layer.cache_dim + heads * (layer.cache_dim + layer.latent_dim))
        flops = 2.0 * rows * heads * context * (layer.cache_dim + layer.latent_dim)
        return self.case("latent_decode", f"{rows} rows of {context}", moved, make, flops)

    def context(self, rows: int, tokens: int, context: int) -> Case:
        layer, heads = self.layer, self.layer.num_heads
        total = rows * tokens

        def make() -> Work:
            cache, table, lengths = self.paged(rows, context + tokens)
            absorbed = self.random(total, heads, layer.latent_dim)
            turned = self.random(total, heads, layer.rope_dim)
            starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device) * tokens
            out = torch.empty_like(absorbed)
            lse = torch.empty(total, heads, device=self.device)
            return lambda: latent_context(
                absorbed, turned, cache, table, starts, lengths, scale=self.scale, out=out, lse=lse
            )

        moved = rows * context * layer.cache_dim
        moved += total * heads * (layer.cache_dim + layer.latent_dim)
        flops = 2.0 * total * heads * context * (layer.cache_dim + layer.latent_dim)
        shape = f"{rows} rows of {tokens} after {context}"
        return self.case("latent_context", shape, moved, make, flops)

    def prompt(self, rows: int, tokens: int) -> Case:
        layer, heads = self.layer, self.layer.num_heads
        key_dim = layer.nope_dim + layer.rope_dim
        total = rows * tokens

        def make() -> Work:
            query = self.random(total, heads, key_dim)
            expanded = self.random(total, heads, layer.nope_dim + layer.value_dim)
            shared = self.random(total, layer.rope_dim)
            starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device) * tokens
            out = self.random(total, heads, layer.value_dim)
            return lambda: latent_prompt(
                query, expanded, shared, starts, scale=self.scale, max_query_len=tokens, out=out
            )

        moved = total * (heads * (key_dim + layer.nope_dim + 2 * layer.value_dim) + layer.rope_dim)
        pairs = rows * tokens * (tokens + 1) / 2
        flops = 2.0 * heads * pairs * (key_dim + layer.value_dim)
        return self.case("latent_prompt", f"{rows} rows of {tokens}", moved, make, flops)

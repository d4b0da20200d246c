"""Kernels of an indexer, and attention to its choice, at DeepSeek V3.2's shapes on eight ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ....kernels.attention.latent.latent_decode import (
    choose_latent_splits,
    latent_decode,
    latent_workspace,
)
from ....kernels.indexer.index_choice import PARTS, divides_rows, index_choice
from ....kernels.indexer.index_inputs import index_inputs
from ....kernels.indexer.index_scores import index_scores
from .case import BLOCK_SIZE, Case, Maker, Work


class Indexed(NamedTuple):
    name: str
    index_heads: int
    index_dim: int
    topk: int
    num_heads: int
    """Attention heads of one rank"""
    latent_dim: int
    rope_dim: int
    batches: tuple[tuple[int, int, int], ...]
    """(rows, tokens of each, length of each including them)"""

    @property
    def cache_dim(self) -> int:
        return self.latent_dim + self.rope_dim


V32 = Indexed(
    "V3.2", 64, 128, 2048, 16, 512, 64, ((1, 1, 131072), (64, 1, 8192), (1, 2048, 16384)),
)  # fmt: skip
TINY_INDEXED = (Indexed("tiny", 3, 24, 8, 3, 24, 8, ((2, 1, 33), (1, 9, 25))),)
MEASURED = (V32,)


def index_cases(
    layers: tuple[Indexed, ...], device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    for layer in layers:
        for rows, tokens, length in layer.batches:
            maker = _Maker(layer, rows, tokens, length, device, dtype)
            yield maker.inputs()
            yield maker.scores()
            yield maker.choice()
            yield maker.attention()


class _Maker(Maker):
    def __init__(
        self,
        layer: Indexed,
        rows: int,
        tokens: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(device, dtype)
        self.layer, self.rows, self.tokens, self.length = layer, rows, tokens, length
        self.total = rows * tokens
        self.pairs = rows * sum(range(length - tokens + 1, length + 1))
        """Pairs of a query and a visible token."""

    def paged(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return block tables (blocks in random order), row starts and positions."""
        starts = torch.arange(self.rows + 1, dtype=torch.int32, device=self.device) * self.tokens
        own = torch.arange(self.length - self.tokens, self.length, device=self.device)
        return self.block_table(self.rows, self.length), starts, own.repeat(self.rows)

    def case(self, kernel: str, moved: float, make: Callable[[], Work], flops: float = 0.0) -> Case:
        layer, batch = self.layer, f"{self.rows} rows of {self.tokens} up to {self.length}"
        return Case(kernel, f"{layer.name}: {batch}, {layer.topk} chosen", moved, make, flops)

    def inputs(self) -> Case:
        layer, total = self.layer, self.total

        def make() -> Work:
            query = self.random(total, layer.index_heads, layer.index_dim)
            key = self.random(total, layer.index_dim)
            weight, bias = self.random(layer.index_dim), self.random(layer.index_dim)
            slots = torch.arange(total, device=self.device)
            cos_sin = torch.randn(total, layer.rope_dim, device=self.device)
            cache = self.random(-(-total // BLOCK_SIZE), BLOCK_SIZE, layer.index_dim)
            return lambda: index_inputs(
                query, key, weight, bias, 1e-6, slots, cos_sin, cache, slots, interleaved=False
            )

        moved = total * 2 * (layer.index_dim + layer.index_heads * layer.rope_dim) * self.item
        return self.case("index_inputs", moved, make)

    def scores(self) -> Case:
        layer = self.layer

        def make() -> Work:
            table, starts, positions = self.paged()
            cache = self.random(table.numel(), BLOCK_SIZE, layer.index_dim)
            query = self.random(self.total, layer.index_heads, layer.index_dim)
            weights = torch.randn(self.total, layer.index_heads, device=self.device)
            out = torch.empty(self.total, self.length, device=self.device)
            return lambda: index_scores(
                query, weights, cache, table, starts, positions, topk=layer.topk,
                max_seq_len=self.length, first_token=0, out=out,
            )  # fmt: skip

        keys = self.rows * self.length + self.total * layer.index_heads
        moved = keys * layer.index_dim * self.item + self.pairs * 4
        flops = 2.0 * self.pairs * layer.index_heads * layer.index_dim
        return self.case("index_scores", moved, make, flops)

    def choice(self) -> Case:
        layer = self.layer

        def make() -> Work:
            table, starts, positions = self.paged()
            scores = torch.randn(self.total, self.length, device=self.device)
            slots = torch.empty(self.total, layer.topk, dtype=torch.int32, device=self.device)
            counts = torch.empty(self.total, dtype=torch.int32, device=self.device)
            best = None
            if divides_rows(self.total, self.length):
                best = torch.empty(2, self.total, PARTS, layer.topk, device=self.device)
            return lambda: index_choice(
                scores, slots, counts, table, starts, positions, block_size=BLOCK_SIZE,
                max_seq_len=self.length, first_token=0, best=best,
            )  # fmt: skip

        return self.case("index_choice", self.pairs * 4 + self.total * layer.topk * 4, make)

    def attention(self) -> Case:
        layer, total, heads = self.layer, self.total, self.layer.num_heads

        def make() -> Work:
            cache = self.random(self.rows * self.length, 1, layer.cache_dim)
            last = self.rows * self.length
            slots = torch.randint(last, (total, layer.topk), dtype=torch.int32, device=self.device)
            counts = torch.full((total,), layer.topk, dtype=torch.int32, device=self.device)
            absorbed = self.random(total, heads, layer.latent_dim)
            turned = self.random(total, heads, layer.rope_dim)
            splits = choose_latent_splits(
                total, heads, layer.latent_dim, self.dtype, layer.topk, self.num_sms
            )
            floats = latent_workspace(total, heads, layer.latent_dim, splits)
            workspace = torch.empty(floats, device=self.device)
            return lambda: latent_decode(
                absorbed, turned, cache, slots, counts, scale=0.1, num_splits=splits,
                workspace=workspace,
            )  # fmt: skip

        read = min(self.rows * self.length, total * layer.topk) * layer.cache_dim
        moved = read + total * heads * (layer.cache_dim + layer.latent_dim)
        flops = 2.0 * total * heads * layer.topk * (layer.cache_dim + layer.latent_dim)
        return self.case("latent_decode", moved * self.item, make, flops)

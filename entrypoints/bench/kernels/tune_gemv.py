"""`bench tune` for one token by dense weights: the products of a model's layer, one after another.

With dependent launches a product begins while the one before it ends, so tiles that are fastest
alone are not in a step: with Arcee's a token took 5 % longer than with those they replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..report import say

EPS = 1e-6
TILES = (
    (1, 512, 1), (1, 1024, 2), (1, 2048, 2), (1, 2048, 4), (1, 4096, 4), (1, 4096, 8),
    (2, 512, 2), (2, 1024, 2), (2, 1024, 4), (2, 2048, 2), (2, 2048, 4), (2, 4096, 4),
    (2, 4096, 8), (4, 256, 1), (4, 512, 2), (4, 512, 4), (4, 1024, 4), (4, 1024, 8),
    (4, 2048, 4), (4, 2048, 8), (4, 4096, 8), (8, 256, 2), (8, 512, 4), (8, 1024, 8),
    (16, 512, 8),
)  # fmt: skip
"""(block_n, block_k, num_warps)"""
ELEMENTS = range(8, 129)
"""Numbers of a tile that a thread holds; of a gated product, of both halves."""
BYTES = 1 << 29
"""Of weights that a measurement reads, so that the L2 cache does not help."""
LEADERS = 6
"""Choices of a product that are tried again after the first round."""
LARGEST_ERROR = 0.02
"""Of a candidate's result, beside that of the rule's tiles, in parts of the largest number."""
GAIN = 0.995
"""Share of the time of the tiles so far that others must stay below."""
Tiles = tuple[int, int, int]


class Layer(NamedTuple):
    """A model's products of one token, in the order of a layer."""

    products: tuple[tuple[int, int, bool], ...]
    """(outputs, inputs, gated)"""
    centered: bool
    """Whether its norms are LayerNorms."""


def candidates(product: tuple[int, int, bool]) -> Iterator[Tiles]:
    """Yield the candidates as tuples of `GemvConfig`."""
    _, inputs, gated = product
    for block_n, block_k, warps in TILES:
        elements = block_n * block_k // (32 * warps) * (2 if gated else 1)
        if elements in ELEMENTS and block_k < 2 * inputs:
            yield block_n, block_k, warps


class GemvProduct:
    """A layer's weights, copies of them. A product that widens follows a norm, and computes it;
    another adds to the residual."""

    def __init__(self, product: tuple[int, int, bool], centered: bool, copies: int) -> None:
        import torch

        outputs, inputs, self.gated = product
        stacked = outputs * (2 if self.gated else 1)

        def random(*size: int) -> Any:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16)

        self.x = random(1, inputs)
        self.weights = [random(stacked, inputs) * 0.02 for _ in range(copies)]
        self.options: list[dict[str, Any]] = [{"residual": random(1, outputs)}] * copies
        if self.gated or outputs > inputs:
            factors, offsets = random(inputs).abs() + 0.5, random(inputs)
            self.options = [{"norm": (factors, EPS)}] * copies
            if centered:
                vectors = torch.stack([factors, offsets], dim=1).float()
                sums = [(weight.float() @ vectors).t().contiguous() for weight in self.weights]
                norm = factors, offsets, EPS
                self.options = [{"layer_norm": norm, "norm_sums": tuple(each)} for each in sums]

    def multiply(self, tiles: tuple[Any, ...], i: int = 0) -> Any:
        """tiles: as of `GemvConfig`, or its first ones."""
        from ....kernels.linear.gemv import GemvConfig, gemv

        config = GemvConfig(*tiles)
        return gemv(self.x, self.weights[i], gated=self.gated, config=config, **self.options[i])


def compile_one(job: tuple[tuple[int, int, bool], bool, Tiles]) -> bool:
    """Compile in a process of its own, into Triton's cache. Return False if the device cannot run
    it."""
    import torch

    product, centered, tiles = job
    try:
        GemvProduct(product, centered, copies=1).multiply(tiles)
        torch.cuda.synchronize()
    except Exception as error:
        say(f"gemv {job}: {error!r:.200}")
        return False
    return True


def jobs(layer: Layer) -> list[tuple[tuple[int, int, bool], bool, Tiles]]:
    """Return what must be compiled before `tune`."""
    return [
        (product, layer.centered, tiles)
        for product in layer.products
        for tiles in candidates(product)
    ]


def is_right(tiles: Tiles, expected: Any, multiply: Callable[[Tiles], Any]) -> bool:
    """Return whether tiles multiply as those of the rule do, and say so if not."""
    error = float((multiply(tiles).float() - expected).abs().max() / expected.abs().max())
    if error < LARGEST_ERROR:
        return True
    say(f"gemv {tiles}: wrong by {error:.3f} of the largest")
    return False


def descend(
    start: Mapping[Any, Tiles], choices: Mapping[Any, list[Tiles]], time: Callable[[Any], float]
) -> tuple[dict[Any, Tiles], float]:
    """Change one product's tiles at a time, to those that make the whole fastest, until none do.

    time: of tiles for all products. After a first round over all choices, only each product's
    LEADERS are tried again. Return the tiles, and their time.
    """
    tiles, left = dict(start), dict(choices)
    best, changed = time(tiles), True
    while changed:
        changed = False
        for product, others in left.items():
            timed = sorted((time({**tiles, product: other}), other) for other in others)
            left[product] = [other for _, other in timed[:LEADERS]]
            if timed and timed[0][0] < GAIN * best:
                best, tiles[product] = timed[0]
                changed = True
    return tiles, best


def tune(
    layer: Layer, compiled: set[Any]
) -> tuple[dict[tuple[int, int, bool], Tiles], float, float]:
    """Return the tiles for each product of a layer, and the microseconds of a layer's products with
    the rule's tiles and with these."""
    import torch

    from ....kernels.linear.gemv import gemv_config
    from .timing import graph_seconds

    numbers = sum(
        outputs * inputs * (2 if gated else 1) for outputs, inputs, gated in layer.products
    )
    copies = max(2, BYTES // (2 * numbers))
    weights = {product: GemvProduct(product, layer.centered, copies) for product in layer.products}

    def time(tiles: Mapping[Any, Tiles]) -> float:
        works = [
            lambda product=product, i=i: weights[product].multiply(tiles[product], i)
            for i in range(copies)
            for product in layer.products
        ]
        seconds = graph_seconds(works, torch.device("cuda"), repeats=5, warmup=1)
        return 1e6 * seconds * len(layer.products)

    start: dict[Any, Tiles] = {}
    choices: dict[Any, list[Tiles]] = {}
    for product, each in weights.items():
        rule = gemv_config(each.weights[0], product[2])
        start[product] = rule.block_n, rule.block_k, rule.num_warps
        expected = each.multiply(start[product]).float()
        choices[product] = [
            tiles
            for tiles in candidates(product)
            if (product, layer.centered, tiles) in compiled
            and is_right(tiles, expected, each.multiply)
        ]
    before = time(start)
    tiles, after = descend(start, choices, time)
    return tiles, before, after

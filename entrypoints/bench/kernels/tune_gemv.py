"""`bench tune` for one token by dense weights: tiles of a layer's products, early starts of the
next kernel, and prefetches.

With dependent launches kernels overlap, so products are timed within a layer, with attention: the
best tiles alone can slow a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..report import say
from .token_layer import Extras, GemvProduct, Layer, Product, TokenLayer

TILES = (
    (1, 256, 1), (1, 512, 1), (1, 1024, 2), (1, 2048, 2), (1, 2048, 4), (1, 4096, 4), (1, 4096, 8),
    (2, 128, 1), (2, 256, 1), (2, 256, 2), (2, 512, 1), (2, 512, 2), (2, 1024, 2), (2, 1024, 4),
    (2, 2048, 2), (2, 2048, 4), (2, 4096, 4), (2, 4096, 8), (4, 128, 1), (4, 256, 1), (4, 256, 2),
    (4, 256, 4), (4, 512, 1), (4, 512, 2), (4, 512, 4), (4, 1024, 4), (4, 1024, 8), (4, 2048, 4),
    (4, 2048, 8), (4, 4096, 8), (8, 64, 1), (8, 128, 1), (8, 128, 2), (8, 256, 1), (8, 256, 2),
    (8, 256, 4), (8, 256, 8), (8, 512, 2), (8, 512, 4), (8, 1024, 8), (16, 64, 1), (16, 128, 1),
    (16, 128, 2), (16, 128, 4), (16, 256, 2), (16, 256, 4), (16, 256, 8), (16, 512, 8),
)  # fmt: skip
"""(block_n, block_k, num_warps)"""
AHEAD = (0, 0.5, 0.75, 1, 1.5, 2, 3, 4)
"""Prefetching programs per multiprocessor."""
ELEMENTS = range(8, 129)
"""Numbers of a tile per thread; both halves of a gated product."""
LEADERS = 5
"""Choices per product that are tried again after the first round."""
LARGEST_ERROR = 0.02
"""Largest error relative to the largest number, besides the rule's."""
GAIN = 0.997
"""A new choice must take less than this share of the time so far."""
Choice = tuple[int, int, int, bool, int]
"""As `GemvConfig`."""
Job = tuple[Product, Extras, Choice]


def candidates(product: Product) -> Iterator[tuple[int, int, int]]:
    _, inputs, gated = product
    for block_n, block_k, warps in TILES:
        elements = block_n * block_k // (32 * warps) * (2 if gated else 1)
        if elements in ELEMENTS and block_k < 2 * inputs:
            yield block_n, block_k, warps


def compile_one(job: Job) -> bool:
    """Compile in a child process, into Triton's cache. Return False if the device cannot run it."""
    import torch

    from ....kernels.linear.gemv import GemvConfig

    product, extras, choice = job
    try:
        GemvProduct(product, extras, copies=1).multiply(GemvConfig(*choice))
        torch.cuda.synchronize()
    except Exception as error:
        say(f"gemv {job}: {error!r:.200}")
        return False
    return True


def is_right(choice: Choice, expected: Any, multiply: Callable[[Choice], Any]) -> bool:
    """Return whether a choice's result matches the rule's; report it if not."""
    error = float((multiply(choice).float() - expected).abs().max() / expected.abs().max())
    if error < LARGEST_ERROR:
        return True
    say(f"gemv {choice}: wrong by {error:.3f} of the largest")
    return False


def descend(
    start: Mapping[Any, Any], choices: Mapping[Any, list[Any]], time: Callable[[Any], float]
) -> tuple[dict[Any, Any], float, dict[Any, list[Any]]]:
    """Change one product's choice at a time to the fastest, until none improves.

    time: of choices for all products. After the first round, only LEADERS per product are tried.
    Return the choices, their time, and each product's leaders.
    """
    chosen, left = dict(start), dict(choices)
    best, changed = time(chosen), True
    while changed:
        changed = False
        for product, others in left.items():
            timed = sorted((time({**chosen, product: other}), other) for other in others)
            left[product] = [other for _, other in timed[:LEADERS]]
            if timed and timed[0][0] < GAIN * best:
                best, chosen[product] = timed[0]
                changed = True
    return chosen, best, left


def tune(
    layer: Layer,
    compile_all: Callable[[Iterable[Job]], set[Job]],
    kept: Mapping[Product, Choice | None] | None = None,
) -> tuple[dict[Product, Choice], float, float]:
    """Return each product's choice, and a layer's microseconds by the rule and with these.

    Tunes tiles first, then the rest for the fastest tiles. compile_all: returns the jobs that the
    device can run. kept: fixed products with their choices; None: an engine's.
    """
    import torch

    from ....kernels.linear.gemv import GemvConfig, gemv_config

    timed = TokenLayer(layer)
    kept = kept or {}

    def time(chosen: Mapping[Product, Choice]) -> float:
        configs = {product: GemvConfig(*choice) for product, choice in chosen.items()}
        return 1e6 * timed.seconds(configs, repeats=7)

    now = timed.engine_configs()
    rules: dict[Product, Choice] = {}
    start: dict[Product, Choice] = {}
    expected: dict[Product, Any] = {}
    for product, each in timed.products.items():
        weight = each.weights[0]
        rule = gemv_config(weight, each.gated)
        start[product] = kept.get(product) or choice_of(now[product], weight)
        rules[product] = start[product] if product in kept else choice_of(rule, weight)
        expected[product] = each.multiply(rule).float()

    def able(choices: Mapping[Product, list[Choice]]) -> dict[Product, list[Choice]]:
        """Return those that run and are correct."""

        def job(product: Product, choice: Choice) -> Job:
            # The same code asks for any number of programs.
            return product, layer.products[product], (*choice[:4], min(choice[4], 1))

        jobs = [job(product, choice) for product, listed in choices.items() for choice in listed]
        compiled = compile_all(dict.fromkeys(jobs))

        def right(product: Product, choice: Choice) -> bool:
            def multiply(choice: Choice) -> Any:
                return timed.products[product].multiply(GemvConfig(*choice))

            return is_right(choice, expected[product], multiply)

        return {
            product: [
                choice
                for choice in listed
                if job(product, choice) in compiled and right(product, choice)
            ]
            for product, listed in choices.items()
        }

    before = time(rules)
    tiles = {
        product: [(*each, *start[product][3:]) for each in candidates(product)]
        for product in start
        if product not in kept
    }
    chosen, _, leaders = descend(start, able(tiles), time)
    num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    starts = {
        product: [
            (*tiles, early, int(share * num_sms))
            for *tiles, _, _ in leaders[product]
            for early in (False, True)
            for share in AHEAD
        ]
        for product in tiles
    }
    chosen, after, _ = descend(chosen, able(starts), time)
    return {product: chosen[product] for product in tiles}, before, after


def choice_of(config: Any, weight: Any) -> Choice:
    """Return a `GemvConfig` as a choice for a weight."""
    from ....kernels.linear.gemv import starts_next_early

    tiles = config.block_n, config.block_k, config.num_warps
    return *tiles, starts_next_early(config, weight.nbytes), config.ahead

"""`bench tune` for one token by dense weights: tiles of the products of a model's layer, who lets
the next kernel start at once, and who asks for later weights.

With dependent launches a product begins while the one before it ends, so what is fastest alone is
not in a step: with Arcee's tiles a token took 5 % longer than with those they replaced. Nor is what
is fastest without attention.
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
"""Programs that ask for later weights, for each multiprocessor."""
ELEMENTS = range(8, 129)
"""Numbers of a tile that a thread holds; of a gated product, of both halves."""
LEADERS = 5
"""Choices of a product that are tried again after the first round."""
LARGEST_ERROR = 0.02
"""Of a candidate's result, beside that of the rule's tiles, in parts of the largest number."""
GAIN = 0.997
"""Share of the time so far that others must stay below."""
Choice = tuple[int, int, int, bool, int]
"""As `GemvConfig`."""
Job = tuple[Product, Extras, Choice]
"""What is compiled."""


def candidates(product: Product) -> Iterator[tuple[int, int, int]]:
    """Yield tiles."""
    _, inputs, gated = product
    for block_n, block_k, warps in TILES:
        elements = block_n * block_k // (32 * warps) * (2 if gated else 1)
        if elements in ELEMENTS and block_k < 2 * inputs:
            yield block_n, block_k, warps


def compile_one(job: Job) -> bool:
    """Compile in a process of its own, into Triton's cache. Return False if the device cannot run
    it."""
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
    """Return whether a choice multiplies as the rule's does, and say so if not."""
    error = float((multiply(choice).float() - expected).abs().max() / expected.abs().max())
    if error < LARGEST_ERROR:
        return True
    say(f"gemv {choice}: wrong by {error:.3f} of the largest")
    return False


def descend(
    start: Mapping[Any, Any], choices: Mapping[Any, list[Any]], time: Callable[[Any], float]
) -> tuple[dict[Any, Any], float, dict[Any, list[Any]]]:
    """Change one product's choice at a time, to the one that makes the whole fastest, until none
    does.

    time: of choices for all products. After a first round over all choices, only each product's
    LEADERS are tried again. Return the choices, their time, and each product's leaders.
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
    """Return the choice for each product of a layer, and the microseconds of a layer by the rule
    and with these.

    From what an engine takes now: first tiles, then for the fastest tiles of each product the rest.
    compile_all: returns what of its jobs the device can run, compiled. kept: products that are not
    tuned, and are not returned, with their choices; None: an engine's.
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
        """Return those that the device can run, and that are right."""

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

"""Kernels of a mixture-of-experts layer, at Qwen3-30B-A3B's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ....core.nn.routing import Routing
from ....kernels.linear.normed_linear import MOST_TOKENS, normed_linear
from ....kernels.moe.combine import combine
from ....kernels.moe.expert_gemv import expert_gemv
from ....kernels.moe.expert_matmul import expert_matmul
from ....kernels.moe.sort_tokens import sort_tokens
from ....kernels.moe.topk_experts import topk_experts
from ....plugins.operations.experts import experts_product, few_slots
from .case import Case, Work


class Mixture(NamedTuple):
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    tokens: tuple[int, ...]


QWEN3_30B_A3B = Mixture(128, 8, 2048, 768, (1, 16, 64, 256, 8192))
TINY_MIXTURE = Mixture(6, 2, 32, 16, (1, 9))


def expert_cases(mixture: Mixture, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the whole layer, then each kernel, per number of tokens."""
    for num_tokens in mixture.tokens:
        yield from _cases(mixture, num_tokens, device, dtype)


def _cases(
    mixture: Mixture, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    num_experts, top_k, hidden, inner, _ = mixture
    num_slots, item = num_tokens * top_k, dtype.itemsize
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    expert_ids = logits.topk(top_k).indices.to(torch.int32)
    # The choice of experts decides how much has to be read.
    read = int(torch.bincount(expert_ids.flatten()).count_nonzero())
    few = few_slots(num_tokens, top_k, num_experts)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def routing() -> Routing:
        weights = torch.full((num_tokens, top_k), 1 / top_k, device=device)
        return Routing(weights, expert_ids.to(device))

    def gate_up() -> torch.Tensor:
        return random(num_experts * 2 * inner, hidden).div_(hidden**0.5)

    def down() -> torch.Tensor:
        return random(num_experts * hidden, inner).div_(inner**0.5)

    def layer() -> Work:
        x, residual, both = random(num_tokens, hidden), random(num_tokens, hidden), routing()
        first, second = gate_up(), down()
        return lambda: experts_product(x, both, first, second, residual)

    def first_product() -> Work:
        x, experts, stacked = random(num_tokens, hidden), routing().experts, gate_up()
        if few:
            return lambda: expert_gemv(x, experts, stacked, num_experts)
        slots, counts = sort_tokens(experts, num_experts)
        return lambda: expert_matmul(x, slots, counts, stacked, top_k=top_k, gated=True)

    def second_product() -> Work:
        x, both, stacked = random(num_slots, inner), routing(), down()
        residual = random(num_tokens, hidden)
        if few:
            return lambda: expert_gemv(
                x, both.experts, stacked, num_experts, factor=both.weights, residual=residual
            )
        slots, counts = sort_tokens(both.experts, num_experts)
        return lambda: expert_matmul(x, slots, counts, stacked, top_k=top_k, gated=False)

    def choice() -> Work:
        device_logits = logits.to(device, dtype)
        return lambda: topk_experts(device_logits, top_k, renormalize=True)

    def router() -> Work:
        x, weight = random(num_tokens, hidden), random(num_experts, hidden).div_(hidden**0.5)
        norm = random(hidden), 1e-6
        return lambda: normed_linear(x, norm, weight)

    def lists() -> Work:
        experts = routing().experts
        return lambda: sort_tokens(experts, num_experts)

    def sums() -> Work:
        parts, weights = random(num_slots, hidden), routing().weights
        residual = random(num_tokens, hidden)
        return lambda: combine(parts, weights, residual, residual)

    product = "expert_gemv" if few else "expert_matmul"
    shape = f"{num_tokens} x {top_k} of {num_experts}"
    weight, rows = read * hidden * inner * item, num_tokens * hidden * item
    flops = 2.0 * num_slots * hidden * inner
    yield Case("experts", shape, 3 * weight + 3 * rows, layer, 3 * flops)
    yield Case(
        product, f"gate and up, {shape}", 2 * weight + rows + num_slots * inner * item,
        first_product, 2 * flops,
    )  # fmt: skip
    num_rows = 2 * rows if few else rows * top_k
    yield Case(
        product, f"down, {shape}", weight + num_slots * inner * item + num_rows,
        second_product, flops,
    )  # fmt: skip
    ids = num_tokens * num_experts * item + num_slots * 8
    if num_tokens <= MOST_TOKENS:
        router_bytes = num_experts * hidden * item + 2 * rows + num_tokens * num_experts * item
        yield Case("normed_linear", shape, router_bytes, router, 2.0 * rows / item * num_experts)
    yield Case("topk_experts", shape, ids, choice, 0.0)
    if not few:
        yield Case("sort_tokens", shape, num_slots * 8 + num_experts * 4, lists, 0.0)
        yield Case("combine", shape, (top_k + 2) * rows, sums, 0.0)

"""How fast a workload could be: bytes and operations from the model's configuration, over what
this card was measured to copy and to multiply.

A floor counts what no implementation can avoid: the matrices once a step, the KV cache of every
running sequence once a step, the products of every token. It leaves out norms, activations,
sampling, and everything on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...core.errors import ConfigError


class Ceilings(msgspec.Struct, frozen=True):
    """What one device was measured to do."""

    copy_bytes_per_second: float
    """Read plus written by a large device-to-device copy."""
    read_bytes_per_second: float
    """Read by a large sum."""
    matmul_flops: float
    """Operations a second of a large square product in `dtype`."""
    dtype: str
    device: str


def given_ceilings(text: str) -> Ceilings:
    """From JSON, as an earlier run wrote them. Raises ConfigError."""
    try:
        return msgspec.json.decode(text, type=Ceilings)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--ceilings: {error}", param="ceilings") from None


def measure_ceilings(device_name: str = "cuda", dtype_name: str = "bfloat16") -> Ceilings:
    """Measure here and now: 1 GiB copied and summed, 8192³ multiplied (less on a CPU)."""
    import torch

    from .timing import median_seconds

    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    big = device.type == "cuda"
    elements = (1 << 28) if big else (1 << 22)
    source = torch.zeros(elements, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    count = 4 * elements
    copy = median_seconds(lambda: target.copy_(source), device, repeats=20 if big else 5)
    read = median_seconds(lambda: torch.sum(source), device, repeats=20 if big else 5)
    size = 8192 if big else 512
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    product = median_seconds(lambda: left @ right, device, repeats=20 if big else 3)
    if big:
        torch.cuda.empty_cache()
    return Ceilings(
        copy_bytes_per_second=2 * count / copy,
        read_bytes_per_second=count / read,
        matmul_flops=2 * size**3 / product,
        dtype=dtype_name,
        device=torch.cuda.get_device_name(device) if big else "cpu",
    )


class Extent(NamedTuple):
    """The sizes of a request, in tokens."""

    prompt: int
    output: int
    cached: int = 0
    """Of the prompt, already in the KV cache."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a Llama-like decoder, dense or of experts, that its cost depends on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    weight_bytes: float
    """Of one weight."""
    kv_bytes: float
    """Of one cached number."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, weight_bytes: float = 2, kv_bytes: float = 2
    ) -> ModelShape:
        """From a checkpoint's config.json."""
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            experts=int(config.get("num_experts") or config.get("num_local_experts") or 0),
            experts_per_token=int(config.get("num_experts_per_tok") or 0),
            expert_intermediate=int(
                config.get("moe_intermediate_size") or config["intermediate_size"]
            ),
        )

    @property
    def head_weights(self) -> int:
        """The output projection; the input embedding is looked up, not read."""
        return self.vocab * self.hidden

    @property
    def attention_weights(self) -> int:
        """Query, key, value and output projections of one layer."""
        width = self.head_dim * self.hidden
        return width * (self.heads + 2 * self.kv_heads) + width * self.heads

    @property
    def active_weights(self) -> float:
        """Weights that one token is multiplied with, the head left out."""
        return self.layers * (self.attention_weights + self._mlp_weights(self.experts_per_token))

    def step_weight_bytes(self, tokens: float) -> float:
        """Read by a step of so many tokens; of the experts, those expected to be chosen at all
        when each token chooses evenly."""
        chosen = 0.0
        if self.experts:
            missed = (1 - self.experts_per_token / self.experts) ** tokens
            chosen = self.experts * (1 - missed)
        layer = self.attention_weights + self._mlp_weights(chosen)
        return (self.layers * layer + self.head_weights) * self.weight_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one position, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    def attention_flops(self, pairs: float) -> float:
        """Scores and weighted sums of so many (query, key) pairs, all layers."""
        return 4 * self.layers * self.heads * self.head_dim * pairs

    def _mlp_weights(self, experts: float) -> float:
        if not self.experts:
            return 3 * self.hidden * self.intermediate
        return self.hidden * (self.experts + 3 * self.expert_intermediate * experts)


def decode_step_floor(shape: ModelShape, ceilings: Ceilings, rows: float, context: float) -> float:
    """Seconds of a step with one token for each of `rows` sequences of `context` tokens in all."""
    weights = shape.step_weight_bytes(rows) / ceilings.copy_bytes_per_second
    flops = 2 * (shape.active_weights + shape.head_weights) * rows
    cache = context * shape.kv_bytes_per_token / ceilings.copy_bytes_per_second
    return max(weights, flops / ceilings.matmul_flops) + cache


def prefill_flops(shape: ModelShape, requests: Sequence[Extent]) -> float:
    """Operations to compute the prompts' tokens that are not cached, causal pairs only."""
    tokens = sum(each.prompt - each.cached for each in requests)
    pairs = sum(
        (each.prompt * (each.prompt + 1) - each.cached * (each.cached + 1)) / 2 for each in requests
    )
    head = 2 * shape.head_weights * len(requests)
    return 2 * shape.active_weights * tokens + head + shape.attention_flops(pairs)


def prefill_floor(shape: ModelShape, ceilings: Ceilings, requests: Sequence[Extent]) -> float:
    """Seconds to compute the prompts and the first tokens."""
    tokens = sum(each.prompt - each.cached for each in requests)
    weights = shape.step_weight_bytes(tokens) / ceilings.copy_bytes_per_second
    return max(weights, prefill_flops(shape, requests) / ceilings.matmul_flops)


def batch_floor(shape: ModelShape, ceilings: Ceilings, requests: Sequence[Extent]) -> float:
    """Seconds for all of them, started at once and decoding together: the fewest weight reads."""
    prompts = np.array([each.prompt for each in requests])
    outputs = np.array([each.output for each in requests])
    total = prefill_floor(shape, ceilings, requests)
    for step in range(1, int(outputs.max())):
        running = outputs > step
        rows = int(running.sum())
        total += decode_step_floor(shape, ceilings, rows, int(prompts[running].sum()) + rows * step)
    return total

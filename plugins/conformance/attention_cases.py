"""What the kit of attention backends is made of: batches, shapes, specs, layers over a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ...core.nn.attention import Attention
from ...core.nn.context import BatchLayout, BuildContext, ForwardContext
from ...core.nn.operations import Norm, Operations
from ...core.protocols.attention import AttentionBackend, AttentionSpec
from .paged import Batch, Sizes

BATCHES: dict[str, Sizes] = {
    "prefill": [(21, 21), (1, 1), (70, 70)],
    "decode": [(1, 1), (19, 1), (140, 1), (64, 1)],
    "mixed": [(75, 1), (6, 1), (40, 40), (9, 3)],
    "chunk": [(90, 17), (33, 32), (70, 5)],
}
"""(total tokens, queries) of each row."""
# query heads, key heads, head size, block size
SHAPES = [
    (2, 2, 64, 16), (4, 1, 80, 4), (8, 1, 96, 16), (16, 1, 128, 32), (4, 2, 256, 8), (6, 2, 64, 1),
]  # fmt: skip
CASES = [(batch, shape) for shape in SHAPES[:2] for batch in BATCHES] + [
    (batch, shape) for shape in SHAPES[2:] for batch in ("decode", "mixed")
]
MAX_MODEL_LEN = 1024


class FutureSpec(AttentionSpec, frozen=True, kw_only=True):
    """A layer of a later version."""

    invented_later: int | None = None


def make_spec(shape: tuple[int, int, int, int] = (4, 2, 128, 16), **features: Any) -> AttentionSpec:
    """Return the spec of a layer of a shape (query heads, key heads, head size, block size)."""
    heads, kv_heads, dim, _ = shape
    return AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, **features
    )


def write(cache: torch.Tensor, layout: BatchLayout, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write a step's keys and values, [num_tokens, num_kv_heads, head_dim], to the cache."""
    for part, new in zip(cache, (key, value), strict=True):
        part.flatten(0, 1)[layout.slot_mapping] = new.to(cache.dtype)


def assert_same(cache: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bitwise; NaN equals NaN."""
    torch.testing.assert_close(cache, expected, atol=0, rtol=0, equal_nan=True)


def bound_layer(spec: AttentionSpec, batch: Batch, dtype: torch.dtype) -> Attention:
    """Return a layer over the batch's cache."""
    layer = Attention(spec, BuildContext(batch.cache.device, dtype, Operations()))
    layer.bind({"kv": batch.cache})
    return layer


def run_layer(
    backend: AttentionBackend,
    spec: AttentionSpec,
    batch: Batch,
    qkv: torch.Tensor,
    cos_sin: torch.Tensor | None,
    norms: tuple[Norm | None, Norm | None],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`Attention.forward` over the batch's cache: [num_tokens, num_heads * head_dim]."""
    layer = bound_layer(spec, batch, qkv.dtype)
    metadata = backend.build_metadata(batch.layout)
    context = ForwardContext(backend, metadata, batch.layout, batch.positions)
    query_norm, key_norm = (None if norm is None else SimpleNamespace(norm=norm) for norm in norms)
    rotary: Any = None if cos_sin is None else SimpleNamespace(cos_sin=cos_sin)
    parts: dict[str, Any] = {"query_norm": query_norm, "key_norm": key_norm}
    out: torch.Tensor = layer(qkv, context, rotary=rotary, sinks=sinks, **parts)
    return out

"""What the kit of attention backends is made of: batches, shapes, specs, layers over a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ...core.cache.formats import QUANTIZED_FORMATS
from ...core.nn.attention import Attention
from ...core.nn.context import BatchLayout, BuildContext, ForwardContext, QueryPlaces
from ...core.nn.kv_cache.quantized_cache import (
    QuantizedCache,
    dequantize,
    quantize,
    token_parts,
    write_blocks,
)
from ...core.nn.operations import HeadLayout, Norm, Operations
from ...core.parts import kv_compression
from ...core.protocols.attention import AttentionBackend, AttentionSpec
from .paged import Batch, Row, Sizes

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
REACHES: list[dict[str, Any]] = [
    {"sliding_window": 40},
    {"attention_chunk_size": 40},
    {"attention_chunk_size": 30, "chunk_lookback": 1},
]
"""Fields of layers that do not attend to all tokens."""


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
    *,
    norm_last: bool = False,
    query_ring: torch.Tensor | None = None,
) -> torch.Tensor:
    """`Attention.forward` over the batch's cache, before weights that a backend may read ahead:
    [num_tokens, num_heads * head_dim]. query_ring: [num_tokens, num_heads, head_dim], for the
    queries, the last token's first."""
    layer = bound_layer(spec, batch, qkv.dtype)
    layer.norm_last, layer.query_ring = norm_last, query_ring
    layer.next_weights = tuple(qkv.new_zeros(rows, 100) for rows in (7, 3000, 3000))
    metadata = backend.build_metadata(batch.layout)
    places = torch.arange(len(qkv), device=qkv.device).flip(0)
    parts = {kv_compression.NAME: QueryPlaces(None, places)}
    context = ForwardContext(backend, metadata, batch.layout, batch.positions, parts=parts)
    query_norm, key_norm = (None if norm is None else SimpleNamespace(norm=norm) for norm in norms)
    rotary: Any = None if cos_sin is None else SimpleNamespace(cos_sin=cos_sin)
    head_norms: dict[str, Any] = {"query_norm": query_norm, "key_norm": key_norm}
    out: torch.Tensor = layer(qkv, context, rotary=rotary, sinks=sinks, **head_norms)
    # A recording cannot ask the device; the same step ran before it.
    if not (qkv.is_cuda and torch.cuda.is_current_stream_capturing()):
        assert not any(weight.any() for weight in layer.next_weights), "weights are read alone"
    return out


def expected_heads(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    norms: tuple[Norm | None, Norm | None],
    norm_last: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a projection of 4 heads over 2 into query, key and value, in float32: normed and
    rotated, or with `norm_last` rotated and normed."""
    operations, layout = Operations(), HeadLayout(4, 2, 64)
    wide = [norm and Norm(norm.weight.float(), norm.eps) for norm in norms]
    first = (None, None) if norm_last else wide
    query, key, value = operations.heads(qkv.float(), layout, positions, cos_sin, *first)
    if norm_last:
        query, key = (
            part if norm is None else operations.rms_norm(part, norm)
            for part, norm in zip((query, key), wide, strict=True)
        )
    return query, key, value


NAN_WORD = 0x7FC07FC0
"""A scale and a zero that are NaN."""


class QuantizedLayer:
    """A layer over a batch's keys and values in a quantized cache, whose words are NaN where no
    earlier token lies."""

    def __init__(self, spec: AttentionSpec, batch: Batch, name: str, dtype: torch.dtype) -> None:
        form, device = QUANTIZED_FORMATS[name], batch.cache.device
        self.batch = batch
        _, num_blocks, block_size = batch.cache.shape[:3]
        parts = {
            part.name: torch.full(
                (part.count, num_blocks, block_size, *part.shape),
                NAN_WORD if part.name == "scales" else 5,
                dtype=getattr(torch, part.dtype),
                device=device,
            )
            for part in form.parts(spec.num_kv_heads, spec.head_dim)
        }
        self.layer = Attention(spec, BuildContext(device, dtype, Operations()))
        self.layer.bind(parts)
        assert isinstance(self.layer.kv_cache, QuantizedCache)
        self.cache = self.layer.kv_cache
        slots = batch.cache.flatten(1, 2)
        old = (~slots[0, :, 0, 0].isnan()).nonzero()[:, 0]
        write_blocks(slots[0, old], slots[1, old], self.cache, old)
        self.before = {name: part.clone() for name, part in token_parts(self.cache).items()}
        self.rows = [
            Row(
                row.query,
                dequantize(*quantize(row.key, form.key_bits)),
                dequantize(*quantize(row.value, form.value_bits)),
            )
            for row in batch.rows
        ]
        """What attention sees: the rows, with rounded keys and values."""

    def run(self, backend: AttentionBackend, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """`Attention.forward` from the fused projection: [num_tokens, num_heads * head_dim]."""
        batch = self.batch
        joined = [batch.joined(name).flatten(1) for name in ("query", "key", "value")]
        metadata = backend.build_metadata(batch.layout)
        context = ForwardContext(backend, metadata, batch.layout, batch.positions)
        out: torch.Tensor = self.layer(torch.cat(joined, dim=1), context, sinks=sinks)
        return out

    def check_cache(self) -> None:
        """Check that the step's tokens were written, and nothing else."""
        expected = QuantizedCache(*(part.clone() for part in self.cache))
        for name, part in token_parts(expected).items():
            part.copy_(self.before[name])
        keys, values = self.batch.joined("key"), self.batch.joined("value")
        write_blocks(keys, values, expected, self.batch.layout.slot_mapping)
        for got, want in zip(self.cache, expected, strict=True):
            # Codes of a backend's own may be one apart, where a number is between two.
            close = (got.long() - want.long()).abs() <= (1 if got.dtype == torch.int8 else 0)
            assert close.float().mean() > 0.99, "other keys or values are in the cache"
        slots = torch.ones(self.before["scales"].shape[1:3], dtype=torch.bool)
        slots.flatten()[self.batch.layout.slot_mapping.cpu()] = False
        for name, part in token_parts(self.cache).items():
            same = (part == self.before[name])[:, slots.to(part.device)]
            assert same.all(), f"{name} of other tokens were written"

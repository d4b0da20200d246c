"""Attention on torch's flex_attention: compiled on a GPU, eager on a CPU.

Keys and values are gathered out of the cache first, the rows of one token together and the others
one by one, and the layer's features become a mask and a score modification. This copies what is
read. A block mask over the whole cache would avoid the copy, but it does not keep other blocks out
of an eager product, and needs blocks of 128 tokens to be fast.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from ...core.cache.reach import Reach
from ...core.nn.context import BatchLayout
from ...core.protocols.attention import AttentionBackend, AttentionSpec

QUERIES_AT_ONCE = 2048
"""Queries of one row per call, which bounds the memory of creating its mask."""


@dataclass(frozen=True)
class Piece:
    """Rows that are computed in one call, each with `num_queries` queries."""

    tokens: slice
    rows: slice
    num_queries: int
    end_block: int
    """Blocks of each row's table that hold all its keys."""
    context: torch.Tensor
    """[rows] int32: keys before each row's first query of this piece."""
    least_context: int
    """The smallest context of these rows."""


@dataclass(frozen=True)
class FlexMetadata:
    """A step in pieces, and the masks created for it so far."""

    layout: BatchLayout
    pieces: list[Piece]
    masks: dict[tuple[int, Reach | None], Any]
    """By piece and reach."""


class FlexAttention(AttentionBackend):
    """`AttentionBackend` on flex_attention. Sinks enter through the log of the softmax's sum."""

    name: ClassVar[str] = "flex"
    cache_groups: ClassVar[bool] = True
    features: ClassVar[frozenset[str]] = frozenset(
        {
            "sliding_window", "attention_chunk_size", "chunk_lookback", "soft_cap", "alibi_slopes",
            "sinks",
        }
    )  # fmt: skip

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """None when it can serve this layer here, else the reason."""
        if device.type not in ("cpu", "cuda"):
            return f"it runs on cuda and cpu, not on {device.type}"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"dtype {dtype} is not float32, float16 or bfloat16"
        if spec.num_heads % spec.num_kv_heads:
            return (
                f"num_heads ({spec.num_heads}) is no multiple of num_kv_heads ({spec.num_kv_heads})"
            )
        if device.type == "cuda" and not 16 <= spec.head_dim <= 256:
            return f"head_dim {spec.head_dim} is not between 16 and 256"
        return None

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self.device = device
        self.block_size = block_size
        self._call = _compiled() if device.type == "cuda" else _eager

    def build_metadata(self, layout: BatchLayout) -> FlexMetadata:
        """Split the step into pieces, by the layout's numpy twins."""
        starts = np.asarray(layout.query_start_cpu)[: layout.num_rows + 1].tolist()
        lengths = np.asarray(layout.seq_lens_cpu)[: layout.num_rows].tolist()
        pieces: list[Piece] = []
        row = 0
        while row < layout.num_rows:
            end = row
            while end < layout.num_rows and starts[end + 1] - starts[end] == 1:
                end += 1
            if end > row:
                pieces.append(self._piece(layout, slice(row, end), starts[row], 1, lengths))
                row = end
                continue
            for first in range(starts[row], starts[row + 1], QUERIES_AT_ONCE):
                count = min(QUERIES_AT_ONCE, starts[row + 1] - first)
                behind = starts[row + 1] - first - count
                pieces.append(
                    self._piece(layout, slice(row, row + 1), first, count, lengths, behind)
                )
            row += 1
        return FlexMetadata(layout, pieces, {})

    def _piece(
        self,
        layout: BatchLayout,
        rows: slice,
        first_token: int,
        num_queries: int,
        lengths: list[int],
        behind: int = 0,
    ) -> Piece:
        """`behind`: queries of the row that come after this piece."""
        num_rows = rows.stop - rows.start
        longest = max(lengths[rows]) - behind
        least = min(lengths[rows]) - behind - num_queries
        return Piece(
            tokens=slice(first_token, first_token + num_rows * num_queries),
            rows=rows,
            num_queries=num_queries,
            end_block=-(-longest // self.block_size),
            context=layout.seq_lens[rows] - behind - num_queries,
            least_context=max(least, 0),
        )

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlexMetadata,
        *,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim] → the same shape; see the protocol."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for number, piece in enumerate(metadata.pieces):
            reach, first_block = spec.reach, 0
            if reach is not None:
                # Blocks out of reach may have been released.
                first = max(reach.first_visible(piece.least_context), 0)
                first_block = first // self.block_size
            context = piece.context - first_block * self.block_size
            blocks = metadata.layout.block_table[piece.rows, first_block : piece.end_block]
            num_rows = blocks.shape[0]
            shape = (num_rows, -1, spec.num_kv_heads, spec.head_dim)
            keys, values = (
                part.index_select(0, blocks.reshape(-1)).view(shape) for part in kv_cache
            )
            # Values after a row's end or out of its reach are undefined, maybe NaN, which a zero
            # weight keeps.
            positions = torch.arange(keys.shape[1], device=query.device)
            hidden = positions >= (context + piece.num_queries)[:, None]
            if reach is not None:
                first_seen = context - (piece.context - reach.first_visible(piece.context))
                hidden |= positions < first_seen[:, None]
            for part in (keys, values):
                part.masked_fill_(hidden[:, :, None, None], 0.0)
            mask = metadata.masks.get((number, reach))
            if mask is None:
                mask = create_block_mask(
                    _visible(context, reach, piece.context),
                    num_rows,
                    None,
                    piece.num_queries,
                    keys.shape[1],
                    device=query.device,
                )
                metadata.masks[number, reach] = mask
            queries = query[piece.tokens].view(num_rows, -1, spec.num_heads, spec.head_dim)
            attended, lse = self._call(
                *(self._padded(each).transpose(1, 2) for each in (queries, keys, values)),
                score_mod=self._score_mod(spec, context),
                block_mask=mask,
                scale=spec.scale,
                # Its kernel for few queries has no tile for many query heads per kv head, but is
                # chosen for them too.
                kernel_options=None if piece.num_queries == 1 else {"BACKEND": "TRITON"},
            )
            attended = attended[..., : spec.head_dim].transpose(1, 2)
            attended = attended.reshape(-1, spec.num_heads, spec.head_dim)
            if sinks is not None:
                # exp(lse) is the sum without the sink: scale by its share of the sum with it.
                share = torch.sigmoid(lse.float() - sinks.float()[:, None])
                attended = attended * share.transpose(1, 2).reshape(-1, spec.num_heads, 1)
            out[piece.tokens] = attended
        return out

    def _padded(self, heads: torch.Tensor) -> torch.Tensor:
        """Pad [..., head_dim] with zeros to a power of two, as the compiler requires on a GPU."""
        missing = (1 << (heads.shape[-1] - 1).bit_length()) - heads.shape[-1]
        if self.device.type != "cuda" or not missing:
            return heads
        return torch.nn.functional.pad(heads, (0, missing))

    def _score_mod(self, spec: AttentionSpec, context: torch.Tensor) -> Callable[..., Any] | None:
        caps = slopes = None
        if spec.soft_cap is not None:
            # A tensor, not a number: the compiler treats a number that changes as dynamic.
            caps = torch.full((spec.num_heads,), spec.soft_cap, device=self.device)
        if spec.alibi_slopes is not None:
            slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=self.device)
        return _score_mod(caps, slopes, context)


def _visible(
    context: torch.Tensor, reach: Reach | None, first_position: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """Return a mask function: whether a row's query sees a key. context, first_position: [rows] of
    each row's first query, the place among the gathered keys and the position."""
    if reach is None:

        def causal(row: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
            seen: torch.Tensor = key <= context[row] + query
            return seen

        return causal

    window, chunk_size = reach.most_tokens, reach.chunk_size

    def windowed(row: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        own = context[row] + query
        seen: torch.Tensor = (key <= own) & (key > own - window)
        return seen

    if chunk_size is None:
        return windowed

    def chunked(row: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        own, position = context[row] + query, first_position[row] + query
        # As `Reach.first_visible`: the window of the chunk's last position.
        last = own + chunk_size - 1 - position % chunk_size
        seen: torch.Tensor = (key <= own) & (key > last - window)
        return seen

    return chunked


def _score_mod(
    caps: torch.Tensor | None, slopes: torch.Tensor | None, context: torch.Tensor
) -> Callable[..., Any] | None:
    """Return the score modification; None: none is needed. caps, slopes: [num_heads]; context:
    [rows]"""
    if caps is None and slopes is None:
        return None

    def change(score: Any, row: Any, head: Any, query: Any, key: Any) -> Any:
        if caps is not None:
            score = caps[head] * torch.tanh(score / caps[head])
        if slopes is not None:
            score = score + slopes[head] * (key - query - context[row])
        return score

    return change


def _eager(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """→ attended, and the log of the softmax's sum, both by row, head and query."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return _flex(*args, **options)


def _flex(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call: Any = flex_attention
    out, aux = call(*args, enable_gqa=True, return_aux=AuxRequest(lse=True), **options)
    return out, aux.lse


@functools.cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the compiled function, created at first use on a GPU, so that an import compiles
    nothing."""
    compiled: Callable[..., Any] = torch.compile(_flex, dynamic=True)
    return compiled

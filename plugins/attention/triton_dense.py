"""Long prompts with nothing cached, which torch's dense attention (cuDNN) takes.

It is faster than the prefill kernel from some thousand tokens on, but needs a plan for each shape,
whose making takes a few tenths of a second and which is kept for good. So it takes single rows,
padded to one of few lengths, whose plans are made while no request waits (`DensePlans`).
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...core.nn.context import BatchLayout
from ...core.protocols.attention import AttentionSpec, LayerSpec

logger = logging.getLogger("jackfield.attention")

DENSE_TOKENS = 2048
"""Number of tokens from which a row with nothing cached is dense."""
DENSE_STEP, DENSE_ROWS = 6144, 4
"""Fewest tokens, and most rows, of steps that are launched instead of replayed for it: recorded
steps use our kernel for all rows."""
PADDING = 8
"""A row is padded by at most this part of the padded length: the time is that of its square, and
cuDNN at 532 TFLOP/s is 1.4 times as fast as our kernel."""
FINE, COARSE = 1024, 4096
"""Distance of lengths with plans, up to 8,192 tokens and beyond."""
MAX_LENGTHS = 16


class Shape(NamedTuple):
    """What a plan depends on besides the length."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class DensePlans:
    """The lengths that cuDNN has plans for, on the thread that launches steps."""

    def __init__(
        self, layers: Iterable[LayerSpec], max_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """max_tokens: of a row in a step. No length has a plan yet."""
        self._device, self._dtype = device, dtype
        self._shapes = {
            Shape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
            for spec in layers
            if isinstance(spec, AttentionSpec) and is_plain(spec)
        }
        lengths = {
            *range(DENSE_TOKENS, min(max_tokens, 8192) + 1, FINE),
            *range(8192, max_tokens + 1, COARSE),
        }
        if max_tokens >= DENSE_TOKENS:
            lengths.add(max_tokens)  # The first chunk of all prompts that are longer.
        self._missing = sorted(lengths)[-MAX_LENGTHS:] if self._shapes else []
        self._lengths: list[int] = []

    def length(self, tokens: int) -> int:
        """Return the length that a row is padded to; 0: it is not dense."""
        place = bisect.bisect_left(self._lengths, tokens)
        if tokens < DENSE_TOKENS or place == len(self._lengths):
            return 0
        length = self._lengths[place]
        return length if (length - tokens) * PADDING <= length else 0

    @torch.inference_mode()
    def prepare_next(self) -> bool:
        """Make the plans of the next length, the longest first; False: none is left."""
        if not self._missing:
            return False
        length = self._missing.pop()
        try:
            for shape in self._shapes:
                query, key = (
                    torch.zeros(length, n, shape.head_dim, dtype=self._dtype, device=self._device)
                    for n in (shape.num_heads, shape.num_kv_heads)
                )
                causal_attention(query, key, key, 1.0, length)
        except RuntimeError as error:  # Also of memory.
            logger.info("no dense attention for prompts of %d tokens: %s", length, error)
        else:
            bisect.insort(self._lengths, length)
        return bool(self._missing)


def is_plain(spec: AttentionSpec) -> bool:
    """Return whether dense attention computes a layer's rows, if its window sees all of them."""
    return (
        spec.features <= {"sliding_window", "attention_chunk_size", "chunk_lookback"}
        and spec.head_dim % 8 == 0
        and spec.head_dim <= 128
    )


class Run(NamedTuple):
    """Rows [first_row, end_row), tokens [first_token, end_token)."""

    first_row: int
    end_row: int
    first_token: int
    end_token: int
    max_query_len: int
    dense_length: int
    """What dense attention pads the run to, a long row with nothing cached; 0: another kernel's."""

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.end_token)

    def is_dense(self, spec: AttentionSpec) -> bool:
        """Return whether dense attention computes what a layer needs of it."""
        reach = spec.reach
        sees_all = reach is None or reach.most_tokens >= self.max_query_len
        return self.dense_length > 0 and sees_all and is_plain(spec)


def divide_rows(layout: BatchLayout, first: int, plans: DensePlans | None) -> tuple[Run, ...]:
    """Return the runs of a step's rows from `first` on: with plans, a row that these serve is a run
    of its own."""
    rows = layout.num_rows
    starts = layout.query_start_cpu[: rows + 1]
    lengths = np.diff(starts)
    fresh = layout.seq_lens_cpu[:rows] == lengths
    dense = {}
    if plans is not None:
        long = np.flatnonzero(fresh & (lengths >= DENSE_TOKENS))
        dense = {row: plans.length(int(lengths[row])) for row in long.tolist() if row >= first}
    runs: list[Run] = []
    for row in [*(row for row, length in dense.items() if length), rows]:
        if first < row:
            longest = int(lengths[first:row].max())
            runs.append(Run(first, row, int(starts[first]), int(starts[row]), longest, 0))
        if row < rows:
            begin, end = int(starts[row]), int(starts[row + 1])
            runs.append(Run(row, row + 1, begin, end, end - begin, dense[row]))
        first = row + 1
    return tuple(runs)


def prefers_dense(query_lens: np.ndarray, seq_lens: np.ndarray, plans: DensePlans) -> bool:
    """Return whether a step is large enough, of long fresh prompts, to be launched for it."""
    if len(query_lens) > DENSE_ROWS:
        return False
    long = query_lens[(query_lens >= DENSE_TOKENS) & (seq_lens == query_lens)]
    tokens: int = sum(n for n in long.tolist() if plans.length(n))
    return tokens >= DENSE_STEP


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, length: int
) -> torch.Tensor:
    """Compute a whole row, padded to `length` tokens.

    query: [tokens, num_heads, head_dim]; key, value: [tokens, num_kv_heads, head_dim] → as query
    """
    queries, keys, values = (
        _padded(part, length)[None].transpose(1, 2) for part in (query, key, value)
    )
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out: torch.Tensor = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    return out.transpose(1, 2)[0, : query.shape[0]].contiguous()


def _padded(part: torch.Tensor, length: int) -> torch.Tensor:
    """Return rows with zeros after them, [length, ...], contiguous: a plan depends on strides."""
    count = part.shape[0]
    if count == length:
        return part.contiguous()
    padded = part.new_empty(length, *part.shape[1:])
    padded[:count] = part
    padded[count:].zero_()
    return padded

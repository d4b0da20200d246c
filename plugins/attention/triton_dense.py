"""Long prompts with nothing cached, which torch's dense attention (cuDNN) takes.

It is faster than the prefill kernel from some thousand tokens on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...core.nn.context import BatchLayout
from ...core.protocols.attention import AttentionSpec

DENSE_TOKENS = 2048
"""Number of tokens from which a row with nothing cached is dense."""
DENSE_STEP, DENSE_ROWS = 6144, 4
"""Fewest tokens, and most rows, of steps that are launched instead of replayed for it: recorded
steps use our kernel for all rows."""


class Run(NamedTuple):
    """Rows [first_row, end_row), tokens [first_token, end_token)."""

    first_row: int
    end_row: int
    first_token: int
    end_token: int
    max_query_len: int
    fresh: bool
    """Long rows of one length with nothing cached."""

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.end_token)

    def is_dense(self, spec: AttentionSpec) -> bool:
        """Return whether torch's attention computes what a layer needs of these rows."""
        reach = spec.reach
        return (
            self.fresh
            and spec.features <= {"sliding_window", "attention_chunk_size", "chunk_lookback"}
            and (reach is None or reach.most_tokens >= self.max_query_len)
            and spec.head_dim % 8 == 0
            and spec.head_dim <= 128
        )


def divide_rows(layout: BatchLayout, first: int, *, dense: bool) -> tuple[Run, ...]:
    """Return the runs of a step's rows from `first` on; with `dense`, long fresh rows are runs of
    their own."""
    rows = layout.num_rows
    starts = layout.query_start_cpu[: rows + 1]
    lengths = np.diff(starts)
    fresh = (lengths >= DENSE_TOKENS) & (layout.seq_lens_cpu[:rows] == lengths) & dense
    runs: list[Run] = []
    for row in [*(np.flatnonzero(fresh[first:]) + first).tolist(), rows]:
        if first < row:
            longest = int(lengths[first:row].max())
            runs.append(Run(first, row, int(starts[first]), int(starts[row]), longest, False))
        if row < rows:
            begin, end = int(starts[row]), int(starts[row + 1])
            run = Run(row, row + 1, begin, end, end - begin, True)
            if runs and runs[-1].fresh and runs[-1].max_query_len == run.max_query_len:
                before = runs.pop()
                run = run._replace(first_row=before.first_row, first_token=before.first_token)
            runs.append(run)
        first = row + 1
    return tuple(runs)


def prefers_dense(query_lens: np.ndarray, seq_lens: np.ndarray) -> bool:
    """Return whether a step is large enough, of long fresh prompts, to be launched for it."""
    if len(query_lens) > DENSE_ROWS:
        return False
    fresh = (query_lens >= DENSE_TOKENS) & (seq_lens == query_lens)
    return int(query_lens[fresh].sum()) >= DENSE_STEP


def dense_attention(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: Run,
) -> torch.Tensor:
    """Compute whole rows of one length.

    query: [rows * tokens, num_heads, head_dim]; key, value: [rows * tokens, num_kv_heads, head_dim]
    """
    rows = run.end_row - run.first_row
    queries, keys, values = (
        part.view(rows, run.max_query_len, *part.shape[1:]).transpose(1, 2)
        for part in (query, key, value)
    )
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out: torch.Tensor = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            is_causal=True,
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )
    return out.transpose(1, 2).flatten(0, 1)

"""Delta rule whose state decays by a number per channel of keys, over rows of any lengths.

    S[k] = exp(g[k]) S[k]    S += k (strength sigmoid(beta) (v - Sᵀ k))ᵀ    y = Sᵀ q / sqrt(K)
    g = rate softplus(step + bias), or bounded, g = bound sigmoid(-rate (step + bias)), with queries
    and keys divided by their lengths first

One program holds a row's state of one head (or some of its values) in registers. Of rows of one
token, and in float32 of all, it walks over tokens. Other rows are computed chunk by chunk, as those
of `delta_rule`, from what `channel_delta_chunks` has found of all chunks in a launch before.

Memory: queries, keys, steps, values and outputs once per token (the first three by each program of
a head), a state once per row: the bound of rows of one token. A walk is bound by the latency of the
longest row's steps. Source: Kimi Linear (arXiv 2510.26692). Twin:
`core.nn.state.operations.StateOperations.channel_delta_rule`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ..launch import launch
from .channel_delta_chunks import channel_delta_chunks
from .delta_rule import delta_recurrence_kernel, delta_step_kernel
from .rows import MOST_ROWS, Rows

VALUES = 16
"""Values per program that walks over tokens."""
ANY_LENGTH = 1 << 30
CHUNKED = True
"""Whether rows of several tokens are computed chunk by chunk, in 16 bits."""


class ChannelTiles(NamedTuple):
    chunk: int = 64
    block_k: int = 64
    """Channels of keys that are computed together, before states are known."""
    chunk_warps: int = 8
    values: int = 32
    """Values per program that walks over chunks."""
    num_warps: int = 4
    num_stages: int = 3


TILES = ChannelTiles()


def channel_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: torch.Tensor,
    beta: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, float | None, float],
    state: torch.Tensor,
    rows: Rows,
    *,
    chunked: bool | None = None,
    tiles: ChannelTiles = TILES,
) -> torch.Tensor:
    """q, k, step: [T, H, K]; v: [T, H, V]; beta: [T, H]: contiguous but for the first dimension;
    weights: rates [H], dt_bias [H, K], float32 and contiguous, bound and strength; state:
    [num_states, H, K, V], contiguous, changed → [T, H, V]

    chunked: in half precision, compute rows of several tokens by chunks; None: where that is
    faster.
    """
    num_tokens, heads, width = v.shape
    size, (rate, dt_bias, bound, strength) = q.shape[2], weights
    out = torch.empty((num_tokens, heads, width), dtype=v.dtype, device=v.device)
    places = (rows.query_start, rows.seq_lens, rows.slots)
    if chunked is None:
        chunked = CHUNKED
    chunked &= rows.max_query_len > 1 and v.dtype != torch.float32
    num_rows = rows.slots.shape[0]
    launch(delta_step_kernel, (num_rows, heads, triton.cdiv(width, VALUES)))(
        out, q, k, v, step, beta, rate, dt_bias, state, *places,
        q.stride(0), k.stride(0), v.stride(0), step.stride(0), beta.stride(0), size**-0.5,
        strength, HEADS=heads, GROUPS=heads, K=size, V=width, BOUND=bound,
        BLOCK_K=triton.next_power_of_2(size), VALUES=VALUES, LONG=1 if chunked else ANY_LENGTH,
        CHANNELS=True, PDL=False, num_warps=2,
    )  # fmt: skip
    if not chunked:
        return out
    chunks = channel_delta_chunks(
        q, k, v, step, beta, *weights, rows,
        chunk=tiles.chunk, block_k=tiles.block_k, num_warps=tiles.chunk_warps,
    )  # fmt: skip
    grid = (min(num_rows, MOST_ROWS), heads, triton.cdiv(width, tiles.values))
    launch(delta_recurrence_kernel, grid)(
        out, chunks.own, chunks.seen, chunks.scores, chunks.decay, chunks.q, chunks.k, state,
        *places, num_rows, num_tokens, chunks.q.stride(0), chunks.k.stride(0),
        HEADS=heads, GROUPS=heads, K=size, V=width, BLOCK_K=max(16, triton.next_power_of_2(size)),
        VALUES=tiles.values, CHUNK=tiles.chunk, PRECISION="tf32", CHANNELS=True,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out

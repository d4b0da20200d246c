"""Torch twins of latent attention: the same computations in float32, with the launchers' arguments,
on any device."""

from __future__ import annotations

import itertools
import math

import torch


def latent_decode(
    absorbed: torch.Tensor,
    turned: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Sums of cached latents by their weights, one query a row; arguments as for the launcher."""
    starts = torch.arange(len(absorbed) + 1)
    sums = torch.zeros(absorbed.shape, dtype=absorbed.dtype, device=absorbed.device)
    lse = torch.zeros(absorbed.shape[:2], device=absorbed.device)
    latent_context(
        absorbed, turned, cache, block_table, starts, seq_lens + 1, scale=scale, out=sums, lse=lse
    )
    return sums


def latent_context(
    absorbed: torch.Tensor,
    turned: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    latent_dim, block_size = absorbed.shape[2], cache.shape[1]
    starts = query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        own = slice(starts[row], starts[row + 1])
        context = length - (own.stop - own.start)
        lse[own] = float("-inf")
        if own.stop == own.start or context == 0:
            continue
        blocks = block_table[row, : -(-context // block_size)].long()
        latents = cache.float()[blocks].flatten(0, 1)[:context]
        queries = torch.cat([absorbed[own], turned[own]], dim=-1).float()
        scores = queries @ latents.mT * scale
        out[own] = (scores.softmax(-1) @ latents[:, :latent_dim]).to(out.dtype)
        lse[own] = scores.logsumexp(-1) / math.log(2)


def latent_prompt(
    query: torch.Tensor,
    expanded: torch.Tensor,
    shared: torch.Tensor,
    query_start: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Each row's own tokens, causally, beside what `out` holds; arguments as for the launcher."""
    nope_dim = query.shape[2] - shared.shape[1]
    starts = query_start.tolist()
    for begin, end in itertools.pairwise(starts):
        both = expanded[begin:end].float()
        turned = shared[begin:end, None].float().expand(-1, both.shape[1], -1)
        key = torch.cat([both[..., :nope_dim], turned], dim=-1)
        scores = torch.einsum("qhd,khd->qhk", query[begin:end].float(), key) * scale
        places = torch.arange(end - begin, device=query.device)
        scores = scores.masked_fill(places > places[:, None, None], float("-inf"))
        value = both[..., nope_dim:].transpose(0, 1)
        if lse is not None:
            earlier = lse[begin:end, :, None] * math.log(2)
            kept = out[begin:end].float().masked_fill(earlier == float("-inf"), 0.0)
            scores = torch.cat([scores, earlier], dim=-1)
        weights = scores.softmax(-1)
        mixed = torch.einsum("qhk,hkv->qhv", weights[..., : end - begin], value)
        if lse is not None:
            mixed += weights[..., end - begin :] * kept
        out[begin:end] = mixed.to(out.dtype)

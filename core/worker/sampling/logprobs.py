"""Log-probabilities and most likely tokens, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .row_chunks import slices
from .step_stages import Rows

LEAST = -9999.0
"""Log-probability of a token that cannot be sampled, as in vLLM: JSON has no infinity."""


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of N positions from raw logits, on the device."""

    top_ids: torch.Tensor
    """[N, k or more] int32 or int64, by likelihood, then id"""
    top_logprobs: torch.Tensor
    """[N, k or more] float32"""
    logprob: torch.Tensor
    """[N] float32, of the position's own token"""
    rank: torch.Tensor
    """[N] int32 or int64: 1 + the number of more likely tokens"""


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int, *, normalized: bool = True
) -> Logprobs:
    """Log-softmax in float32 of logits [N, V] at token_ids [N] and the k most likely tokens, in
    chunks of rows that bound temporaries. normalized: False: the logits themselves.
    """
    count, vocab_size = logits.shape
    k = min(k, vocab_size)
    top_ids = token_ids.new_empty((count, k))
    top_logprobs = logits.new_empty((count, k), dtype=torch.float32)
    logprob = logits.new_empty(count, dtype=torch.float32)
    rank = token_ids.new_empty(count)
    for rows in slices(count, vocab_size):
        raw = logits[rows].to(torch.float32)
        total = raw.logsumexp(dim=-1, keepdim=True) if normalized else 0.0
        own = raw.gather(1, token_ids[rows].unsqueeze(1))
        rank[rows].copy_((raw > own).sum(dim=-1).add_(1))
        logprob[rows].copy_((own - total).squeeze(1))
        if k:
            values, ids = top_tokens(raw, k)
            top_logprobs[rows].copy_(values.sub_(total))
            top_ids[rows].copy_(ids)
    return Logprobs(top_ids, top_logprobs, logprob, rank)


def row_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: Rows, k: int, *, normalized: bool = True
) -> Logprobs:
    """`token_logprobs` of some rows; others hold zeros."""
    if rows.batch is None:
        return token_logprobs(logits, token_ids, k, normalized=normalized)
    some = token_logprobs(
        logits.index_select(0, rows.batch),
        token_ids.index_select(0, rows.batch),
        k,
        normalized=normalized,
    )
    spread = [
        part.new_zeros((len(token_ids), *part.shape[1:])).index_copy_(0, rows.batch, part)
        for part in (some.top_ids, some.top_logprobs, some.logprob, some.rank)
    ]
    return Logprobs(*spread)


def top_tokens(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest of float32 values [N, V], largest first, equal values by ascending id.

    → values [N, k], ids [N, k] int64. `torch.topk` leaves ties undefined, which bfloat16 logits
    have. So sort keys are unique int64: the float's order-preserving bits, then the reversed id.
    """
    vocab_size = values.shape[1]
    # -0.0 becomes 0.0: the two are equal and must be ordered by id.
    bits = values.add(0.0).contiguous().view(torch.int32)
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=values.device)
    keys = torch.add(reversed_ids, ordered, alpha=1 << 32)
    if k < vocab_size:
        keys = keys.topk(k, dim=-1).values
    else:
        keys = keys.sort(dim=-1, descending=True).values
    ids = (vocab_size - 1) - keys.bitwise_and_(0xFFFFFFFF)
    return values.gather(1, ids), ids

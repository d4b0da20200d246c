"""One token a row: the largest logit / temperature + Gumbel noise, in one pass over the logits.

The noise is a function of (seed, position, token) alone, the same as in `core.worker.noise`:
E(u) = -log(1 - u) with u from a hash, and -log E is Gumbel. Memory: num_rows * vocab_size logits,
read once; the parts' winners are a few kilobytes. About 40 operations a logit where a row draws,
2 where it is greedy.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

PART = 4096
"""Logits that one program takes."""

# As in core/worker/noise.py: signed 32-bit constants of the mixing steps.
_GOLDEN = tl.constexpr(-1640531527)
_MIX_1 = tl.constexpr(-2048144789)
_MIX_2 = tl.constexpr(-1028477387)
_SCALE = tl.constexpr(2.0**-31 * (1.0 - 2.0**-23))


@triton.jit
def _fold(x):
    """x ^= the unsigned high half, moved down."""
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _log_exponential(token, key_0, key_1, key_2):
    """log E of tokens under a row's keys."""
    x = _fold(token + _GOLDEN)
    x = _fold(x * _MIX_1)
    x = _fold(x * _MIX_2)
    x = _fold(key_0 + x * key_1)
    x = _fold(x * key_2)
    u = tl.abs((x.to(tl.float32) + 0.5) * _SCALE)
    # log(1 - u) to full precision: Kahan's log1p.
    w = 1.0 - u
    exponential = tl.where(w == 1.0, u, tl.log(w) * (u / (w - 1.0)))
    return tl.log(exponential)


@triton.jit
def _part_kernel(
    best_ptr,
    token_ptr,
    logits_ptr,
    inverse_temperature_ptr,
    noise_ptr,
    keys_ptr,
    stride_logits,
    stride_inverse_temperature,
    stride_noise,
    stride_keys,
    vocab_size,
    num_parts,
    PART_SIZE: tl.constexpr,
):
    """One program a (row, part): the part's winner, +inf where a logit is not a number."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * PART_SIZE + tl.arange(0, PART_SIZE)
    inside = token < vocab_size
    logits = tl.load(logits_ptr + row * stride_logits + token, mask=inside, other=-float("inf"))
    logits = logits.to(tl.float32) * tl.load(
        inverse_temperature_ptr + row * stride_inverse_temperature
    )
    broken = tl.max((logits != logits).to(tl.int32), axis=0)
    if tl.load(noise_ptr + row * stride_noise) != 0.0:
        keys = keys_ptr + row * stride_keys
        logits -= _log_exponential(token, tl.load(keys), tl.load(keys + 1), tl.load(keys + 2))
    best = tl.max(logits, axis=0)
    winner = tl.min(tl.where(logits == best, token, vocab_size), axis=0)
    best = tl.where(broken != 0, float("inf"), best)
    tl.store(best_ptr + row * num_parts + part, best)
    tl.store(token_ptr + row * num_parts + part, winner)


@triton.jit
def _row_kernel(out_ptr, bad_ptr, best_ptr, token_ptr, num_parts, vocab_size, BLOCK: tl.constexpr):
    """One program a row: the winner of its parts, the lowest id among equals."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < num_parts
    best = tl.load(best_ptr + row * num_parts + part, mask=inside, other=-float("inf"))
    token = tl.load(token_ptr + row * num_parts + part, mask=inside, other=vocab_size)
    highest = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == highest, token, vocab_size), axis=0)
    bad = (highest == float("inf")) | (highest == -float("inf"))
    tl.store(out_ptr + row, tl.where(bad, 0, winner).to(tl.int64))
    tl.store(bad_ptr + row, bad)


def choose_tokens(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor,
    noise: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [num_rows, vocab_size], any float type, last stride 1; inverse_temperature, noise
    (0: greedy): [num_rows] float32, any stride; keys: [num_rows, 3] int32
    → token ids [num_rows] int64, and [num_rows] bool: NaN or an infinity won (the id is 0).
    """
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, PART)
    best = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    token = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    bad = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return out, bad
    _part_kernel[(num_rows, num_parts)](
        best,
        token,
        logits,
        inverse_temperature,
        noise,
        keys,
        logits.stride(0),
        inverse_temperature.stride(0),
        noise.stride(0),
        keys.stride(0),
        vocab_size,
        num_parts,
        PART_SIZE=PART,
        num_warps=8,
    )
    _row_kernel[(num_rows,)](
        out,
        bad,
        best,
        token,
        num_parts,
        vocab_size,
        BLOCK=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
    return out, bad

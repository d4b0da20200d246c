"""One token a row: the largest logit / temperature + Gumbel noise, in one pass over the logits.

The noise is a function of (seed, position, token) alone, the same as in `core.worker.noise`:
E(u) = -log(1 - u) with u from a hash, and -log E is Gumbel. Memory: num_rows * vocab_size logits,
read once; the parts' winners are a few kilobytes. Some 30 instructions a logit where a row draws,
and they are what bounds it; so logarithms are the processor's own, to base 2 (their errors move a
score by some 1e-6), and the hash of a token, which no row changes, is made once for several rows.
A greedy row takes 5.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from .rehearsal import launch

PART = 2048
"""Logits of a row that one program takes."""
SHARING = 4
"""Rows that one program takes where they are many."""

# As in core/worker/noise.py: signed 32-bit constants of the mixing steps.
_GOLDEN = tl.constexpr(-1640531527)
_MIX_1 = tl.constexpr(-2048144789)
_MIX_2 = tl.constexpr(-1028477387)
_STEP_0 = tl.constexpr(-1640531535)
_STEP_1 = tl.constexpr(-2048144777)
_STEP_2 = tl.constexpr(-1028477379)
_SCALE = tl.constexpr(2.0**-31 * (1.0 - 2.0**-23))
_LOG2E = tl.constexpr(1.4426950408889634)


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def _log2(x):
        """The interpreter has numpy's."""
        return tl.log2(x)

else:

    @triton.jit
    def _log2(x):
        """One instruction. Error: 2^-22 absolute for x in (0.5, 2), else relative."""
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _fold(x):
    """x ^= the unsigned high half, moved down."""
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _mixed(x):
    """The mixing of `core.worker.noise`: fold, multiply, fold, multiply, fold."""
    x = _fold(x)
    x = _fold(x * _MIX_1)
    return _fold(x * _MIX_2)


@triton.jit
def _log2_exponential(hashes, key_0, key_1, key_2):
    """log2(E / ln 2) of tokens, given their hashes, under a row's keys."""
    x = _fold(key_0 + hashes * key_1)
    x = _fold(x * key_2)
    u = tl.abs(x.to(tl.float32) * _SCALE + 0.5 * _SCALE)
    # -log2(1 - u): by its series where that is more precise, and small values decide who wins.
    series = u * _LOG2E * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    return _log2(tl.where(u < 0.0625, series, -_log2(1.0 - u)))


@triton.jit
def _larger(a, b):
    """NaN where either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr"]
)
def _part_kernel(
    best_ptr,
    token_ptr,
    logits_ptr,
    settings_ptr,
    slots_ptr,
    lengths_ptr,
    stride_logits,
    stride_settings,
    num_rows,
    vocab_size,
    num_parts,
    TEMPERATURE: tl.constexpr,
    NOISE: tl.constexpr,
    LANES: tl.constexpr,
    PART_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program a part of ROWS rows: their parts' winners, +inf where one is not a number."""
    part = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    token = part * PART_SIZE + tl.arange(0, PART_SIZE)
    inside = token < vocab_size
    hashes = _mixed(token + _GOLDEN)
    for row in range(first, tl.minimum(first + ROWS, num_rows)):
        row64 = first.to(tl.int64) + (row - first)
        settings = settings_ptr + tl.load(slots_ptr + row64) * stride_settings
        place = logits_ptr + row64 * stride_logits + token
        logits = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
        inverse_temperature = tl.load(settings + TEMPERATURE).to(tl.float32, bitcast=True)
        if tl.load(settings + NOISE) != 0:
            position = tl.load(lengths_ptr + row64).to(tl.int32)
            key_0 = _mixed(tl.load(settings + LANES) + position * _STEP_0)
            key_1 = _mixed(tl.load(settings + LANES + 1) + position * _STEP_1) | 1
            key_2 = _mixed(tl.load(settings + LANES + 2) + position * _STEP_2) | 1
            noise = _log2_exponential(hashes, key_0, key_1, key_2)
            # Scores to base 2; what all of them lack is the same.
            logits = logits * (inverse_temperature * _LOG2E) - noise
        else:
            logits = logits * inverse_temperature
        best = tl.reduce(logits, 0, _larger)
        winner = tl.min(tl.where(logits == best, token, vocab_size), axis=0)
        best = tl.where(best != best, float("inf"), best)
        tl.store(best_ptr + row64 * num_parts + part, best)
        tl.store(token_ptr + row64 * num_parts + part, winner)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr"])
def _row_kernel(
    chosen_ptr,
    history_ptr,
    slots_ptr,
    lengths_ptr,
    best_ptr,
    token_ptr,
    stride_history,
    num_parts,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program a row: the winner of its parts, the lowest id among equals."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < num_parts
    best = tl.load(best_ptr + row * num_parts + part, mask=inside, other=-float("inf"))
    token = tl.load(token_ptr + row * num_parts + part, mask=inside, other=vocab_size)
    highest = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == highest, token, vocab_size), axis=0)
    bad = (highest == float("inf")) | (highest == -float("inf"))
    place = history_ptr + tl.load(slots_ptr + row) * stride_history + tl.load(lengths_ptr + row)
    tl.store(place, tl.where(bad, 0, winner))
    tl.store(chosen_ptr + row, tl.where(bad, -1, winner))


def choose_tokens(
    logits: torch.Tensor,
    settings: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    token_history: torch.Tensor,
    chosen: torch.Tensor,
    *,
    temperature: int,
    noise: int,
    lanes: int,
) -> None:
    """Choose, write each row's token to `chosen` and to its place in `token_history`.

    logits: [num_rows, vocab_size], any float type, last stride 1; settings: [slots, columns] int32,
    one row a slot: column `temperature` holds its inverse and `noise` 0.0 for greedy rows, both
    float32 bit-cast, and from `lanes` on are three words of the seed; slots: [num_rows] int64;
    lengths: [num_rows] int64, tokens before the new one; token_history: [slots, positions] int32;
    chosen: [num_rows] int32: -1 where NaN or an infinity won (the history then gets 0).
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    num_parts = triton.cdiv(vocab_size, PART)
    best = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    token = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    sharing = SHARING if num_rows >= 2 * SHARING else 1
    launch(_part_kernel, (num_parts, triton.cdiv(num_rows, sharing)))(
        best,
        token,
        logits,
        settings,
        slots,
        lengths,
        logits.stride(0),
        settings.stride(0),
        num_rows,
        vocab_size,
        num_parts,
        TEMPERATURE=temperature,
        NOISE=noise,
        LANES=lanes,
        PART_SIZE=PART,
        ROWS=sharing,
        num_warps=4,
    )
    launch(_row_kernel, (num_rows,))(
        chosen,
        token_history,
        slots,
        lengths,
        best,
        token,
        token_history.stride(0),
        num_parts,
        vocab_size,
        BLOCK=triton.next_power_of_2(num_parts),
        num_warps=1,
    )

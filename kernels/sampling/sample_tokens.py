"""One token per row with any sampling parameters: penalties, biases, masks, top-k, top-p, min-p,
log-probabilities. The launches are the same for any rows, so that a graph can contain them; a row's
settings are read on the device, and a row without a setting skips its work.

Three kernels process [rows, vocab_size] in parts, the last two of them only listed rows; two
process one row per program.

- `_begin_kernel`, every row: edits, temperature, and the winner of each part with its noise; for
  filtered rows the largest logit, for rows with log-probabilities the sum of exponentials.
- `limits_kernel`, one program per row: bounds on the limit, which is enough for most rows.
- `_pivots_kernel`, twice, rows with a top_p or a large top_k: counts and mass of the tokens at or
  above 16 pivots, then, if the limit's interval has many tokens, at or above 16 pivots within it.
- `_gather_kernel`, filtered rows and those with log-probabilities: tokens above the interval are
  kept, and their winner with noise found; those inside become candidates. A part that can have
  neither is not read.
- `choose_row`, one program per row: finds the exact limit among the candidates, the winner and the
  top tokens, and updates the slot's tables.

The set that top_k, top_p and min_p keep is exact. Tokens are in order of (logit, then lower id). A
token's mass is the integer floor(2^40 * exp(x - max x)), with x the float32 logit after temperature
and exp from the processor's base-2 exponential. Sums of integers do not depend on their order, so a
row keeps the same tokens at any place in any batch. top_p keeps the shortest prefix with at least
ceil(top_p * total) of the mass that min_p and top_k leave. Compared with exact arithmetic, a sum is
off by less than 2^-20 of the total.

Memory: a row of 151,936 bfloat16 logits is 304 KB; each kernel that reads it reads it once.
Instructions: about 30 per logit in the first kernel if noise is drawn, 80 in one with pivots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import triton
import triton.language as tl

from ..launch import launch
from .choose_row import CANDIDATES, LIKELIEST, choose_row_kernel
from .gumbel_noise import LOG2E, drawn_scores, largest, row_keys, token_hashes
from .layout import (
    FILTER,
    FLAGS,
    FORCED,
    IDLE,
    LOG_MIN_P,
    LOGPROBS,
    NOISE,
    TOP_P,
    float_of,
    temperature_factor,
)
from .limits import (
    ARRIVED,
    ASKED,
    FLOOR,
    FOUND,
    HIGHEST,
    LAST,
    LIKELY,
    LIKELY_FLOOR,
    LIMITS,
    LOWER,
    NEAR,
    ORIGIN,
    PIVOT_SUMS,
    PIVOTS,
    SLOT,
    STAGE,
    STEP,
    SUMS,
    UPPER,
    limits_kernel,
    narrow,
)
from .logits import edited, token_mass

PART = 2048
SHARING = 4
"""Rows per program, if there are many."""
LISTED_PROGRAMS = 16
"""Programs per part that share the listed rows."""
_ALIVE, _SURE = tl.constexpr(1 << 40), tl.constexpr(1 << 20)
_PLACES = tl.constexpr(1 << 20)
"""Units of three token counts that share one 64-bit sum."""
_COARSE = tl.constexpr(4294967296.0)
"""2^32: the mass at or above a pivot is counted in 2^-32 of the most likely token's mass."""


@triton.jit(
    do_not_specialize=["num_rows", "skip", "sharing"],
    do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr", "grammar_rows_ptr"],
)
def _begin_kernel(
    logits_ptr,
    settings_ptr,
    counts_ptr,
    allowed_ptr,
    grammar_ptr,
    grammar_rows_ptr,
    slots_ptr,
    lengths_ptr,
    best_ptr,
    token_ptr,
    raw_ptr,
    stride_logits,
    stride_settings,
    stride_counts,
    stride_allowed,
    stride_grammar,
    num_rows,
    vocab_size,
    num_parts,
    skip,
    sharing,
    PART_SIZE: tl.constexpr,
):
    part = tl.program_id(0)
    first = tl.program_id(1) * sharing
    token = part * PART_SIZE + tl.arange(0, PART_SIZE)
    inside = token < vocab_size
    hashes = token_hashes(token)
    for row in range(first, tl.minimum(first + sharing, num_rows)):
        row64 = first.to(tl.int64) + (row - first)
        slot = tl.load(slots_ptr + row64)
        settings = settings_ptr + slot * stride_settings
        flags = tl.load(settings + FLAGS) & ~skip
        if (flags & IDLE) == 0:
            place = logits_ptr + row64 * stride_logits + token
            raw = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
            at = row64 * num_parts + part
            if (flags & LOGPROBS) != 0:
                top = largest(raw)
                base = tl.where(top == -float("inf"), 0.0, top)
                total = tl.sum(tl.exp2((raw - base) * LOG2E), axis=0)
                tl.store(raw_ptr + at * 2, top)
                tl.store(raw_ptr + at * 2 + 1, total)
            if (flags & FORCED) == 0:
                x = edited(
                    raw, token, part * PART_SIZE, inside, row64, slot, flags, settings,
                    counts_ptr, allowed_ptr, grammar_ptr, grammar_rows_ptr,
                    stride_counts, stride_allowed, stride_grammar, vocab_size, PART_SIZE,
                )  # fmt: skip
                inverse_temperature = temperature_factor(settings, skip)
                noise = (tl.load(settings + NOISE) != 0) & ((flags & FILTER) == 0)
                if noise:
                    position = tl.load(lengths_ptr + row64).to(tl.int32)
                    key_0, key_1, key_2 = row_keys(settings, position)
                    factor = inverse_temperature * LOG2E
                    x = drawn_scores(x, factor, hashes, key_0, key_1, key_2)
                else:
                    x = x * inverse_temperature
                best = largest(x)
                winner = tl.min(tl.where(x == best, token, vocab_size), axis=0)
                tl.store(best_ptr + at, best)
                tl.store(token_ptr + at, winner)


@triton.jit(
    do_not_specialize=["num_rows", "skip", "closer"],
    do_not_specialize_on_alignment=["grammar_rows_ptr"],
)
def _pivots_kernel(
    logits_ptr,
    settings_ptr,
    counts_ptr,
    allowed_ptr,
    grammar_ptr,
    grammar_rows_ptr,
    listed_ptr,
    limits_ptr,
    found_ptr,
    sums_ptr,
    stride_logits,
    stride_settings,
    stride_counts,
    stride_allowed,
    stride_grammar,
    num_rows,
    vocab_size,
    num_parts,
    skip,
    closer,
    PART_SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """One program: a part of some listed rows; counts tokens and mass at or above each pivot.

    A part's mass is a float32 sum in a fixed order; parts are added as integers, so their order
    does not matter. The last program of a row narrows the row's limits.
    """
    part = tl.program_id(0)
    for listed in range(tl.program_id(1), tl.load(listed_ptr), tl.num_programs(1)):
        row64 = tl.load(listed_ptr + 2 + listed).to(tl.int64)
        found = found_ptr + row64 * FOUND
        limits = limits_ptr + row64 * LIMITS
        sums = sums_ptr + row64 * SUMS
        slot, flags = tl.load(found + SLOT).to(tl.int64), tl.load(found + ASKED)
        highest, last = tl.load(limits + HIGHEST), tl.load(limits + LAST)
        origin, step = tl.load(limits + ORIGIN), tl.load(limits + STEP)
        if tl.load(found + STAGE) == closer + 1:
            settings = settings_ptr + slot * stride_settings
            factor = temperature_factor(settings, skip)
            log_min_p = float_of(settings, LOG_MIN_P)
            token = part * PART_SIZE + tl.arange(0, PART_SIZE)
            inside = token < vocab_size
            place = logits_ptr + row64 * stride_logits + token
            raw = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
            x = edited(
                raw, token, part * PART_SIZE, inside, row64, slot, flags, settings,
                counts_ptr, allowed_ptr, grammar_ptr, grammar_rows_ptr,
                stride_counts, stride_allowed, stride_grammar, vocab_size, PART_SIZE,
            )  # fmt: skip
            x = x * factor
            alive = (x >= highest + log_min_p) & (x > -float("inf"))
            mass = tl.exp2((x - highest) * LOG2E)
            # NaN reaches no pivot.
            x = tl.where(alive, x, float("nan"))
            pivot = tl.arange(0, COUNT)
            least = tl.where(pivot == COUNT - 1, last, origin - step * (pivot + 1))
            above = x[:, None] >= least[None, :]
            counts = tl.sum(above.to(tl.int32), axis=0)
            masses = tl.sum(tl.where(above, mass[:, None], 0.0), axis=0)
            to = sums + PIVOT_SUMS + 2 * COUNT * closer + pivot
            tl.atomic_add(to, counts.to(tl.int64), sem="relaxed")
            tl.atomic_add(to + COUNT, (masses * _COARSE).to(tl.int64), sem="relaxed")
            tl.debug_barrier()
            before = tl.atomic_add(found + ARRIVED, 1, sem="acq_rel")
            if before == num_parts * (closer + 1) - 1:
                narrow(settings, limits, found, sums, closer, COUNT, CAPACITY)


@triton.jit(
    do_not_specialize=["num_rows", "skip"],
    do_not_specialize_on_alignment=["lengths_ptr", "grammar_rows_ptr"],
)
def _gather_kernel(
    logits_ptr,
    settings_ptr,
    counts_ptr,
    allowed_ptr,
    grammar_ptr,
    grammar_rows_ptr,
    listed_ptr,
    lengths_ptr,
    best_ptr,
    token_ptr,
    won_ptr,
    raw_ptr,
    limits_ptr,
    found_ptr,
    sums_ptr,
    values_ptr,
    ids_ptr,
    likely_values_ptr,
    likely_ids_ptr,
    stride_logits,
    stride_settings,
    stride_counts,
    stride_allowed,
    stride_grammar,
    num_rows,
    vocab_size,
    num_parts,
    skip,
    PART_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    MOST_LIKELY: tl.constexpr,
):
    """One program: a part of some listed rows; finds the tokens that are certainly kept, and the
    candidates. A part whose largest logit is too small for either is not read."""
    part = tl.program_id(0)
    token = part * PART_SIZE + tl.arange(0, PART_SIZE)
    inside = token < vocab_size
    for listed in range(tl.program_id(1), tl.load(listed_ptr + 1), tl.num_programs(1)):
        row64 = tl.load(listed_ptr + 2 + num_rows + listed).to(tl.int64)
        # Loaded together: these loads depend only on the row's number.
        limits, found = limits_ptr + row64 * LIMITS, found_ptr + row64 * FOUND
        at = row64 * num_parts + part
        slot, flags = tl.load(found + SLOT).to(tl.int64), tl.load(found + ASKED)
        floor, highest = tl.load(limits + FLOOR), tl.load(limits + HIGHEST)
        lower, upper = tl.load(limits + LOWER), tl.load(limits + UPPER)
        least = tl.load(limits + LIKELY_FLOOR)
        filtered = ((flags & FILTER) != 0) & ((flags & FORCED) == 0)
        filtered = filtered & (tl.load(best_ptr + at) >= floor)
        scored = ((flags & LOGPROBS) != 0) & (tl.load(raw_ptr + at * 2) >= least)
        if filtered | scored:
            settings = settings_ptr + slot * stride_settings
            factor, share = temperature_factor(settings, skip), float_of(settings, TOP_P)
            position = tl.load(lengths_ptr + row64).to(tl.int32)
            place = logits_ptr + row64 * stride_logits + token
            raw = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
            if scored:
                likely = inside & (raw >= least)
                count = tl.sum(likely.to(tl.int32), axis=0)
                to = tl.cumsum(likely.to(tl.int32), axis=0) - 1
                to += tl.atomic_add(found + LIKELY, count, sem="relaxed")
                likely = likely & (to < MOST_LIKELY)
                tl.store(likely_values_ptr + row64 * MOST_LIKELY + to, raw, mask=likely)
                tl.store(likely_ids_ptr + row64 * MOST_LIKELY + to, token, mask=likely)
            if filtered:
                x = edited(
                    raw, token, part * PART_SIZE, inside, row64, slot, flags, settings,
                    counts_ptr, allowed_ptr, grammar_ptr, grammar_rows_ptr,
                    stride_counts, stride_allowed, stride_grammar, vocab_size, PART_SIZE,
                )  # fmt: skip
                x = x * factor
                alive = (x >= floor) & (x > -float("inf"))
                sure = alive & (x >= upper)
                near = alive & (x >= lower) & (x < upper)
                counts = tl.where(alive, _ALIVE, 0) + tl.where(sure, _SURE, 0)
                counts = tl.sum(counts + near.to(tl.int64), axis=0)
                num_sure = (counts // _SURE) % _PLACES
                num_near = (counts % _PLACES).to(tl.int32)
                sums = sums_ptr + row64 * SUMS
                tl.atomic_add(sums, counts // _ALIVE, sem="relaxed")
                if share < 1.0:
                    mass = tl.where(alive, token_mass(x, highest), 0)
                    tl.atomic_add(sums + 1, tl.sum(mass, axis=0), sem="relaxed")
                    if num_sure > 0:
                        mass = tl.where(sure, mass, 0)
                        tl.atomic_add(sums + 3, tl.sum(mass, axis=0), sem="relaxed")
                if num_near > 0:
                    to = tl.cumsum(near.to(tl.int32), axis=0) - 1
                    to += tl.atomic_add(found + NEAR, num_near, sem="relaxed")
                    near = near & (to < CAPACITY)
                    tl.store(values_ptr + row64 * CAPACITY + to, x, mask=near)
                    tl.store(ids_ptr + row64 * CAPACITY + to, token, mask=near)
                if num_sure > 0:
                    tl.atomic_add(sums + 2, num_sure, sem="relaxed")
                    key_0, key_1, key_2 = row_keys(settings, position)
                    scores = drawn_scores(x, LOG2E, token_hashes(token), key_0, key_1, key_2)
                    scores = tl.where(sure, scores, -float("inf"))
                    best = tl.max(scores, axis=0)
                    winner = tl.min(tl.where(scores == best, token, vocab_size), axis=0)
                    tl.store(won_ptr + at, best)
                    tl.store(token_ptr + at, winner)
                else:
                    tl.store(won_ptr + at, -float("inf"))
        if filtered == 0:
            tl.store(won_ptr + at, -float("inf"))


class Tables(Protocol):
    """The slots' tables, at constant addresses."""

    @property
    def settings(self) -> torch.Tensor:
        """[slots, columns] int32 (`sampling_layout`)"""

    @property
    def counts(self) -> torch.Tensor:
        """[slots, vocab_size] int16: how often each token was generated, up to 32,767; the sign
        bit: the prompt has it. Read and written only for slots with `PENALTIES`."""

    @property
    def allowed(self) -> torch.Tensor:
        """[slots, ceil(vocab_size / 32)] int32: token i may come next if bit i % 32 of word i // 32
        is on. Read for slots with `ALLOWED`, written for those with `BANS`."""

    @property
    def history(self) -> torch.Tensor:
        """[slots, positions] int32: the tokens of each slot; the chosen one is written."""


def sample_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    tables: Tables,
    out: Sequence[torch.Tensor],
    *,
    grammar: tuple[torch.Tensor, torch.Tensor] | None = None,
    skip: int = 0,
) -> None:
    """Choose a token for each row, write it to `out` and to the history, and update the tables that
    the slot's next token needs: counts, and tokens that may not come next.

    logits: [num_rows, vocab_size], any float type, last stride 1, not changed; slots: [num_rows]
    int64; lengths: [num_rows] int64, tokens before the new one, and for rows with the flag `FORCED`
    the token that is scored instead of choosing one; grammar: bits [count, words] int32 and, for
    each row, [num_rows] int64, the index of its bits, -1 for none; read for slots with `GRAMMAR`;
    skip: flags that no row has in this step.

    out: chosen [rows] int32 (-1: NaN or an infinity won, or no token is allowed; the history gets
    0); top ids [rows, width] int32, most likely first, lower ids first among equals; their
    log-probabilities [rows, width] float32; that of the chosen token [rows] float32; its rank
    [rows] int32, 1 + the number of more likely ones. The last four are of the unedited logits, and
    not written for rows that do not request them.

    Scratch: 64 KB of candidates per row and about 400 bytes per part of 2,048 tokens.
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    device = logits.device
    num_parts = triton.cdiv(vocab_size, PART)
    block = triton.next_power_of_2(num_parts)

    def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    best, won = (room(num_rows, num_parts, dtype=torch.float32) for _ in range(2))
    token, found = room(num_rows, num_parts), room(num_rows, FOUND.value)
    raw = room(num_rows, num_parts, 2, dtype=torch.float32)
    limits = room(num_rows, LIMITS.value, dtype=torch.float32)
    sums = room(num_rows, SUMS.value, dtype=torch.int64)
    values, ids = room(num_rows, CANDIDATES, dtype=torch.float32), room(num_rows, CANDIDATES)
    likely = room(num_rows, LIKELIEST, dtype=torch.float32), room(num_rows, LIKELIEST)
    bits, bit_rows = grammar if grammar is not None else (tables.allowed, slots)
    read = (logits, tables.settings, tables.counts, tables.allowed, bits, bit_rows)
    sizes = (
        logits.stride(0), tables.settings.stride(0), tables.counts.stride(0),
        tables.allowed.stride(0), bits.stride(0), num_rows, vocab_size, num_parts, skip,
    )  # fmt: skip
    listed = torch.zeros(2 + 2 * num_rows, dtype=torch.int32, device=device)
    sharing = SHARING if num_rows >= 2 * SHARING else 1
    common = {"PART_SIZE": PART, "enable_fp_fusion": False}
    launch(_begin_kernel, (num_parts, triton.cdiv(num_rows, sharing)))(
        *read, slots, lengths, best, token, raw, *sizes, sharing, num_warps=4, **common
    )
    launch(limits_kernel, (num_rows,))(
        tables.settings, slots, best, raw, limits, found, sums, listed,
        tables.settings.stride(0), num_rows, vocab_size, num_parts, skip, BLOCK=block,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    grid = (num_parts, min(num_rows, LISTED_PROGRAMS))
    for closer in (0, 1) if not skip & FILTER.value else ():
        launch(_pivots_kernel, grid)(
            *read, listed, limits, found, sums, *sizes, closer, COUNT=PIVOTS, CAPACITY=CANDIDATES,
            maxnreg=80, num_warps=8, **common,
        )  # fmt: skip
    launch(_gather_kernel, grid)(
        *read, listed, lengths, best, token, won, raw, limits, found, sums, values, ids, *likely,
        *sizes, CAPACITY=CANDIDATES, MOST_LIKELY=LIKELIEST, maxnreg=64, num_warps=8, **common,
    )  # fmt: skip
    launch(choose_row_kernel, (num_rows,))(
        *read, slots, lengths, tables.history, best, token, won, raw, limits, found, sums, values,
        ids, *likely, *out, *sizes, tables.history.stride(0), out[1].stride(0),
        CAPACITY=CANDIDATES, MOST_LIKELY=LIKELIEST, BLOCK=block, num_warps=16,
        enable_fp_fusion=False,
    )  # fmt: skip

"""One token a row, whatever its request asks for: penalties, biases, masks, top-k, top-p, min-p,
log-probabilities. The same launches for any rows, so that a graph can hold them; what a row asks
for is read on the device, and a row that does not ask skips the work.

Four kernels go over [rows, vocab_size] in parts, the last three of them over listed rows alone;
one goes over rows. No row is sorted, and no processed
logit is stored: what is needed again is made again from the logits.

- `_begin_kernel`, every row: edits, temperature, and the winner of each part with its noise; of
  rows that are filtered the largest logit, of those with log-probabilities the sum of exponentials.
- `_pivots_kernel`, twice, filtered rows: tokens and mass at or above 16 pivots, then at or above
  16 within the interval that the limit falls into.
- `_gather_kernel`, filtered rows and those with log-probabilities: tokens above the interval are
  in, with their noise and their winner; those inside become candidates.
- `choose_row`, one program a row: finds the exact limit among the candidates, the winner, the top
  tokens, and keeps the slot's books.

The second `_pivots_kernel` leaves rows alone whose interval holds few enough candidates, which is
nearly every row of a trained model.

The set that top_k, top_p and min_p keep is exact. Tokens are in order of (logit, then lower id). A
token's mass is the integer floor(2^40 * exp(x - max x)), with x the float32 logit after temperature
and exp by the processor's base-2 exponential (2 units in the last place). Sums of integers do not
depend on their order, so a row keeps the same tokens at any place in any batch. top_p keeps the
shortest prefix with at least ceil(top_p * total) of the mass of what min_p and top_k left. Against
exact arithmetic a sum is off by less than 2^-20 of the total.

Memory: a row of 151,936 bfloat16 logits is 304 KB; each kernel reads it once, where it reads it.
Instructions: some 30 a logit in the first kernel where noise is drawn, 100 in one with pivots.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import triton
import triton.language as tl

from .choose_row import CANDIDATES, LIKELIEST, choose_row_kernel
from .rehearsal import launch
from .sampling_layout import (
    FILTER,
    FLAGS,
    FORCED,
    IDLE,
    LOG_MIN_P,
    LOGPROBS,
    NOISE,
    NUM_LOGPROBS,
    TOP_K,
    TOP_P,
    float_of,
    temperature_factor,
)
from .sampling_logits import (
    edited,
    enough_likely,
    row_bounds,
    token_mass,
)
from .sampling_noise import LOG2E, drawn_scores, largest, row_keys, token_hashes

PART = 2048
"""Logits of a row that one program takes."""
SHARING = 4
"""Rows that one program takes where they are many."""
LISTED_PROGRAMS = 16
"""Programs of a part that share the rows which need a kernel: those that do not cost nothing."""
PIVOTS = 16
_COUNT_SHIFT = tl.constexpr(44)
"""A number of tokens and their mass, to 32 bits, in one sum of 64."""
_COUNT_UNIT = tl.constexpr(1 << 44)
_MASS_MASK = tl.constexpr((1 << 44) - 1)
_COARSE = tl.constexpr(4294967296.0)


@triton.jit(
    do_not_specialize=["num_rows", "skip"],
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
    found_ptr,
    listed_ptr,
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
    ROWS: tl.constexpr,
):
    """One program a part of ROWS rows. Rows that the next kernels have to look at are listed."""
    part = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    token = part * PART_SIZE + tl.arange(0, PART_SIZE)
    inside = token < vocab_size
    hashes = token_hashes(token)
    for row in range(first, tl.minimum(first + ROWS, num_rows)):
        row64 = first.to(tl.int64) + (row - first)
        slot = tl.load(slots_ptr + row64)
        settings = settings_ptr + slot * stride_settings
        flags = tl.load(settings + FLAGS) & ~skip
        if (flags & IDLE) == 0:
            if part == 0:
                tl.store(found_ptr + row64 * 2, 0)
                tl.store(found_ptr + row64 * 2 + 1, 0)
                if (flags & FILTER) != 0:
                    to = tl.atomic_add(listed_ptr, 1)
                    tl.store(listed_ptr + 2 + to, row)
                if (flags & (FILTER | LOGPROBS)) != 0:
                    to = tl.atomic_add(listed_ptr + 1, 1)
                    tl.store(listed_ptr + 2 + num_rows + to, row)
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


@triton.jit
def _packed_sums(pivots_ptr, row64, num_parts, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """→ tokens and coarse mass at or above each pivot of a row, [COUNT] int64 both."""
    part = tl.arange(0, BLOCK)[:, None]
    pivot = tl.arange(0, COUNT)[None, :]
    packed = tl.load(
        pivots_ptr + (row64 * num_parts + part) * COUNT + pivot, mask=part < num_parts, other=0
    )
    counts = tl.sum(packed >> _COUNT_SHIFT, axis=0)
    masses = tl.sum(packed & _MASS_MASK, axis=0)
    return counts, masses


@triton.jit
def _first_reached(counts, masses, by_count, target, COUNT: tl.constexpr):
    """→ index of the first pivot with enough at or above it; tokens there, and above the one
    before."""
    index = tl.arange(0, COUNT)
    amounts = tl.where(by_count, counts, masses)
    first = tl.min(tl.where(amounts >= target, index, COUNT - 1), axis=0)
    held = tl.max(tl.where(index == first, counts, 0), axis=0)
    above = tl.max(tl.where(index == first - 1, counts, 0), axis=0)
    return first, held, above


@triton.jit
def _interval(
    settings,
    highest,
    step,
    coarse_ptr,
    row64,
    num_parts,
    COUNT: tl.constexpr,
    CAPACITY,
    BLOCK: tl.constexpr,
):
    """Where the limit of a filtered row is, by the first pivots.

    → lower, upper: it is at or above the one (-inf: nothing is known) and below the other; whether
    only a closer look makes the candidates few enough; whether tokens are counted, or their mass
    added up; how much is wanted; whether there is a limit; whether candidates begin at the top.
    """
    counts, masses = _packed_sums(coarse_ptr, row64, num_parts, BLOCK, COUNT)
    index = tl.arange(0, COUNT)
    alive = tl.max(tl.where(index == COUNT - 1, counts, 0), axis=0)
    mass = tl.max(tl.where(index == COUNT - 1, masses, 0), axis=0)
    top_k = tl.load(settings + TOP_K).to(tl.int64)
    top_p = float_of(settings, TOP_P)
    by_count = top_k < alive
    limited = by_count | (top_p < 1.0)
    target = tl.where(by_count, top_k, (mass.to(tl.float32) * top_p).to(tl.int64))
    first, held, above = _first_reached(counts, masses, by_count, target, COUNT)
    upper = tl.where(first == 0, float("inf"), highest - step * first.to(tl.float32))
    lower = tl.where(first == COUNT - 1, -float("inf"), highest - step * (first + 1).to(tl.float32))
    from_top = by_count & (top_p < 1.0)
    few = tl.where(from_top, held, held - above) <= CAPACITY
    return lower, upper, limited & (few == 0), by_count, target, limited, from_top


@triton.jit
def _finer(lower, upper, highest, step, COUNT: tl.constexpr):
    """→ origin and step of the pivots within an interval."""
    origin = tl.minimum(upper, highest)
    unbound = lower == -float("inf")
    fine = tl.where(unbound, 2.0 * step, (origin - lower) * (1.0 / COUNT))
    return origin, fine


@triton.jit(
    do_not_specialize=["num_rows", "skip"],
    do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr", "grammar_rows_ptr"],
)
def _pivots_kernel(
    logits_ptr,
    settings_ptr,
    counts_ptr,
    allowed_ptr,
    grammar_ptr,
    grammar_rows_ptr,
    slots_ptr,
    listed_ptr,
    best_ptr,
    coarse_ptr,
    fine_ptr,
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
    COUNT: tl.constexpr,
    CAPACITY: tl.constexpr,
    FINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a part of some filtered rows: sums above each of COUNT pivots; the last of them
    has all that may still be kept at or above it."""
    part = tl.program_id(0)
    for listed in range(tl.program_id(1), tl.load(listed_ptr), tl.num_programs(1)):
        row64 = tl.load(listed_ptr + 2 + listed).to(tl.int64)
        slot = tl.load(slots_ptr + row64)
        settings = settings_ptr + slot * stride_settings
        flags = tl.load(settings + FLAGS) & ~skip
        highest, step = row_bounds(best_ptr, row64, num_parts, BLOCK)
        wanted = (highest < float("inf")) & (highest > -float("inf"))
        origin = highest
        last = tl.full((), -float("inf"), tl.float32)
        if FINE:
            if wanted:
                lower, upper, wanted, _, _, _, _ = _interval(
                    settings, highest, step, coarse_ptr, row64, num_parts, COUNT, CAPACITY,
                    BLOCK,
                )  # fmt: skip
                origin, step = _finer(lower, upper, highest, step, COUNT)
                last = lower
        if wanted:
            token = part * PART_SIZE + tl.arange(0, PART_SIZE)
            inside = token < vocab_size
            place = logits_ptr + row64 * stride_logits + token
            raw = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
            x = edited(
                raw, token, part * PART_SIZE, inside, row64, slot, flags, settings,
                counts_ptr, allowed_ptr, grammar_ptr, grammar_rows_ptr,
                stride_counts, stride_allowed, stride_grammar, vocab_size, PART_SIZE,
            )  # fmt: skip
            x = x * temperature_factor(settings, skip)
            alive = (x >= highest + float_of(settings, LOG_MIN_P)) & (x > -float("inf"))
            mass = (tl.exp2((x - highest) * LOG2E) * _COARSE).to(tl.int64)
            one = tl.full((PART_SIZE,), _COUNT_UNIT, tl.int64)
            amount = tl.where(alive, one + mass, 0)
            out = fine_ptr if FINE else coarse_ptr
            out += (row64 * num_parts + part) * COUNT
            for pivot in range(0, COUNT - 1):
                least = origin - step * (pivot + 1)
                tl.store(out + pivot, tl.sum(tl.where(x >= least, amount, 0), axis=0))
            tl.store(out + COUNT - 1, tl.sum(tl.where(x >= last, amount, 0), axis=0))


@triton.jit(
    do_not_specialize=["num_rows", "skip"],
    do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr", "grammar_rows_ptr"],
)
def _gather_kernel(
    logits_ptr,
    settings_ptr,
    counts_ptr,
    allowed_ptr,
    grammar_ptr,
    grammar_rows_ptr,
    slots_ptr,
    listed_ptr,
    lengths_ptr,
    best_ptr,
    token_ptr,
    won_ptr,
    raw_ptr,
    found_ptr,
    coarse_ptr,
    fine_ptr,
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
    COUNT: tl.constexpr,
    CAPACITY: tl.constexpr,
    LIKELY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a part of some listed rows: what is in for sure, and the candidates."""
    part = tl.program_id(0)
    token = part * PART_SIZE + tl.arange(0, PART_SIZE)
    inside = token < vocab_size
    for listed in range(tl.program_id(1), tl.load(listed_ptr + 1), tl.num_programs(1)):
        row64 = tl.load(listed_ptr + 2 + num_rows + listed).to(tl.int64)
        slot = tl.load(slots_ptr + row64)
        settings = settings_ptr + slot * stride_settings
        flags = tl.load(settings + FLAGS) & ~skip
        place = logits_ptr + row64 * stride_logits + token
        raw = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
        at = row64 * num_parts + part
        if (flags & LOGPROBS) != 0:
            num = tl.load(settings + NUM_LOGPROBS)
            least = enough_likely(raw_ptr, row64, num_parts, num, BLOCK)
            likely = inside & (raw >= least)
            count = tl.sum(likely.to(tl.int32), axis=0)
            if count > 0:
                base = tl.atomic_add(found_ptr + row64 * 2 + 1, count)
                to = base + tl.cumsum(likely.to(tl.int32), axis=0) - 1
                likely = likely & (to < LIKELY)
                tl.store(likely_values_ptr + row64 * LIKELY + to, raw, mask=likely)
                tl.store(likely_ids_ptr + row64 * LIKELY + to, token, mask=likely)
        if (flags & FILTER) != 0:
            highest, step = row_bounds(best_ptr, row64, num_parts, BLOCK)
            if (highest < float("inf")) & (highest > -float("inf")):
                lower, upper, closer, by_count, target, limited, from_top = _interval(
                    settings, highest, step, coarse_ptr, row64, num_parts, COUNT, CAPACITY,
                    BLOCK,
                )  # fmt: skip
                if closer:
                    origin, step = _finer(lower, upper, highest, step, COUNT)
                    counts, masses = _packed_sums(fine_ptr, row64, num_parts, BLOCK, COUNT)
                    nearer, _, _ = _first_reached(counts, masses, by_count, target, COUNT)
                    above = origin - step * nearer.to(tl.float32)
                    upper = tl.where(nearer > 0, above, upper)
                    below = origin - step * (nearer + 1).to(tl.float32)
                    lower = tl.where(nearer < COUNT - 1, below, lower)
                upper = tl.where(from_top, float("inf"), upper)
                upper = tl.where(limited, upper, -float("inf"))
                x = edited(
                    raw, token, part * PART_SIZE, inside, row64, slot, flags, settings,
                    counts_ptr, allowed_ptr, grammar_ptr, grammar_rows_ptr,
                    stride_counts, stride_allowed, stride_grammar, vocab_size, PART_SIZE,
                )  # fmt: skip
                x = x * temperature_factor(settings, skip)
                alive = (x >= highest + float_of(settings, LOG_MIN_P)) & (x > -float("inf"))
                mass = tl.where(alive, token_mass(x, highest), 0)
                sure = alive & (x >= upper)
                tl.store(sums_ptr + at * 4, tl.sum(alive.to(tl.int64), axis=0))
                tl.store(sums_ptr + at * 4 + 1, tl.sum(mass, axis=0))
                num_sure = tl.sum(sure.to(tl.int64), axis=0)
                tl.store(sums_ptr + at * 4 + 2, num_sure)
                tl.store(sums_ptr + at * 4 + 3, tl.sum(tl.where(sure, mass, 0), axis=0))
                best = tl.full((), -float("inf"), tl.float32)
                winner = vocab_size + tl.full((), 0, tl.int32)
                if num_sure > 0:
                    position = tl.load(lengths_ptr + row64).to(tl.int32)
                    key_0, key_1, key_2 = row_keys(settings, position)
                    scores = drawn_scores(x, LOG2E, token_hashes(token), key_0, key_1, key_2)
                    scores = tl.where(sure, scores, -float("inf"))
                    best = tl.max(scores, axis=0)
                    winner = tl.min(tl.where(scores == best, token, vocab_size), axis=0)
                tl.store(won_ptr + at, best)
                tl.store(token_ptr + at, winner)
                near = alive & (x >= lower) & (x < upper)
                count = tl.sum(near.to(tl.int32), axis=0)
                if count > 0:
                    base = tl.atomic_add(found_ptr + row64 * 2, count)
                    to = base + tl.cumsum(near.to(tl.int32), axis=0) - 1
                    near = near & (to < CAPACITY)
                    tl.store(values_ptr + row64 * CAPACITY + to, x, mask=near)
                    tl.store(ids_ptr + row64 * CAPACITY + to, token, mask=near)


class Tables(Protocol):
    """What the kernels read of slots, at addresses that stay."""

    @property
    def settings(self) -> torch.Tensor:
        """[slots, columns] int32 (`sampling_layout`)"""

    @property
    def counts(self) -> torch.Tensor:
        """[slots, vocab_size] int16: how often each token was generated, up to 32,767; the sign
        bit: the prompt has it. Read and written for slots with `PENALTIES` alone."""

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
    """Choose a token for each row, write it to `out` and to its place in the history, and keep the
    books that the slot's next token needs: counts, tokens that are barred for now.

    logits: [num_rows, vocab_size], any float type, last stride 1, left as they are; slots:
    [num_rows] int64; lengths: [num_rows] int64, tokens before the new one, and of rows with the
    flag `FORCED` the token that is scored instead of choosing one; grammar: bits [count, words]
    int32 and for each row [num_rows] int64 which of them hold it, -1 for none; read for slots with
    `GRAMMAR`; skip: flags that no row has this time.

    out: chosen [rows] int32 (-1: NaN or an infinity won, or nothing may come, and the history gets
    0); top ids [rows, width] int32, most likely first, lower ids first among equals; their
    log-probabilities [rows, width] float32; that of the chosen token [rows] float32; its rank
    [rows] int32, 1 + the number of more likely ones. The last four are of the logits as they came,
    and untouched for rows that do not ask.

    Scratch: 64 KB of candidates a row and some 400 bytes for each part of 2,048 tokens.
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
    token, found = room(num_rows, num_parts), room(num_rows, 2)
    raw = room(num_rows, num_parts, 2, dtype=torch.float32)
    coarse, fine = (room(num_rows, num_parts, PIVOTS, dtype=torch.int64) for _ in range(2))
    sums = room(num_rows, num_parts, 4, dtype=torch.int64)
    values, ids = room(num_rows, CANDIDATES, dtype=torch.float32), room(num_rows, CANDIDATES)
    likely = room(num_rows, LIKELIEST, dtype=torch.float32), room(num_rows, LIKELIEST)
    bits, bit_rows = grammar if grammar is not None else (tables.allowed, slots)
    read = (logits, tables.settings, tables.counts, tables.allowed, bits, bit_rows, slots)
    sizes = (
        logits.stride(0), tables.settings.stride(0), tables.counts.stride(0),
        tables.allowed.stride(0), bits.stride(0), num_rows, vocab_size, num_parts, skip,
    )  # fmt: skip
    listed = torch.zeros(2 + 2 * num_rows, dtype=torch.int32, device=device)
    sharing = SHARING if num_rows >= 2 * SHARING else 1
    common = {"PART_SIZE": PART, "enable_fp_fusion": False}
    narrow = {"COUNT": PIVOTS, "CAPACITY": CANDIDATES, "BLOCK": block, "num_warps": 8, **common}
    launch(_begin_kernel, (num_parts, triton.cdiv(num_rows, sharing)))(
        *read, lengths, best, token, raw, found, listed, *sizes, ROWS=sharing, num_warps=4, **common
    )
    grid = (num_parts, min(num_rows, LISTED_PROGRAMS))
    for closer in (False, True) if not skip & FILTER.value else ():
        launch(_pivots_kernel, grid)(
            *read, listed, best, coarse, fine, *sizes, FINE=closer, **narrow
        )
    launch(_gather_kernel, grid)(
        *read, listed, lengths, best, token, won, raw, found, coarse, fine, sums, values, ids,
        *likely, *sizes, LIKELY=LIKELIEST, maxnreg=128, **narrow,
    )  # fmt: skip
    launch(choose_row_kernel, (num_rows,))(
        *read, lengths, tables.history, best, token, won, raw, found, sums, values, ids, *likely,
        *out, *sizes, tables.history.stride(0), out[1].stride(0),
        CAPACITY=CANDIDATES, LIKELY=LIKELIEST, BLOCK=block, num_warps=16,
        enable_fp_fusion=False,
    )  # fmt: skip

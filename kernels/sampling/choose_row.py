"""The last sampling kernel, one program per row: chooses the token from parts and candidates.

Candidates are few, and stay in registers while bisection finds the exact limit: first the logit,
then, among equal logits, the id. If they do not fit (thousands of equal logits, for example), the
kernel searches in passes over the whole row: correct, but slow.

It also updates the slot's tables: the token in the history, its count, and the tokens that may not
come next (stop ids before min_tokens, bad words whose beginning ends the history).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gumbel_noise import LOG2E, drawn_scores, row_keys, token_hashes
from .layout import (
    BANS,
    FILTER,
    FLAGS,
    FORCED,
    HEADER,
    IDLE,
    LOG_MIN_P,
    LOGPROBS,
    MIN_TOKENS,
    NUM_LOGPROBS,
    PENALTIES,
    PROMPT_LEN,
    TOP_K,
    TOP_P,
    float_of,
    record_of,
    temperature_factor,
)
from .limits import FOUND, LIKELY, LIKELY_FLOOR, LIMITS, NEAR, SUMS
from .logits import edited, ordered, places, token_mass

CANDIDATES = 8192
"""Most candidates that are searched in registers."""
LIKELIEST = 1024
"""Tokens from which the top ones are taken."""
_CHUNK = tl.constexpr(1024)
"""Tokens per iteration of a pass; divides into `BIAS_PART`."""
_RANKED = tl.constexpr(8192)
"""Tokens per iteration when ranking the chosen token."""
_LISTED = tl.constexpr(32)
"""Stop ids or bad words per iteration."""
_LOWEST = tl.constexpr(-(1 << 62))
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _share(total, top_p):
    """Return ceil(top_p * total), at least 1 and at most total, int64."""
    exact = total.to(tl.float64) * top_p.to(tl.float64)
    share = exact.to(tl.int64)
    share = tl.where(share.to(tl.float64) < exact, share + 1, share)
    return tl.minimum(tl.maximum(share, 1), total)


@triton.jit
def _kept(x, ids, alive, amounts, target):
    """Mark the shortest prefix, in order of (logit, then lower id), with `target` of the amounts.

    target: int64, at least 1 and at most their sum over `alive`. → [as x] bool
    """
    keys = ordered(x)
    low = tl.min(tl.where(alive, keys, 2147483647), axis=0).to(tl.int64)
    high = tl.max(tl.where(alive, keys, -2147483648), axis=0).to(tl.int64) + 1
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        above = tl.sum(tl.where(alive & (keys >= middle), amounts, 0), axis=0)
        enough = above >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    above = tl.sum(tl.where(alive & (keys > low), amounts, 0), axis=0)
    tied = alive & (keys == low)
    before = tl.min(tl.where(tied, ids, 2147483647), axis=0) - 1
    last = tl.max(tl.where(tied, ids, -1), axis=0)
    while last - before > 1:
        middle = before + ((last - before) >> 1)
        reached = above + tl.sum(tl.where(tied & (ids <= middle), amounts, 0), axis=0)
        enough = reached >= target
        last = tl.where(enough, middle, last)
        before = tl.where(enough, before, middle)
    return alive & ((keys > low) | (tied & (ids <= last)))


@triton.jit
def _chunk(
    start,
    logits_ptr,
    settings,
    counts_ptr,
    allowed_ptr,
    grammar_ptr,
    grammar_rows_ptr,
    row64,
    slot,
    flags,
    stride_logits,
    stride_counts,
    stride_allowed,
    stride_grammar,
    vocab_size,
    highest,
    skip,
):
    """Recompute _CHUNK tokens: ids, logits after edits and temperature, and which may be kept."""
    token = start + tl.arange(0, _CHUNK)
    inside = token < vocab_size
    place = logits_ptr + row64 * stride_logits + token
    raw = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
    x = edited(
        raw, token, start, inside, row64, slot, flags, settings, counts_ptr, allowed_ptr,
        grammar_ptr, grammar_rows_ptr, stride_counts, stride_allowed, stride_grammar, vocab_size,
        _CHUNK,
    )  # fmt: skip
    x = x * temperature_factor(settings, skip)
    alive = (x >= highest + float_of(settings, LOG_MIN_P)) & (x > -float("inf"))
    return token, x, alive


@triton.jit
def _in_passes(
    logits_ptr,
    settings,
    counts_ptr,
    allowed_ptr,
    grammar_ptr,
    grammar_rows_ptr,
    row64,
    slot,
    flags,
    stride_logits,
    stride_counts,
    stride_allowed,
    stride_grammar,
    vocab_size,
    highest,
    by_count,
    by_mass,
    position,
    skip,
):
    """Choose the token of a row with too many candidates around its limit."""
    top_k = tl.load(settings + TOP_K).to(tl.int64)
    top_p = float_of(settings, TOP_P)
    # Tokens that may still be kept are at or above it.
    least = tl.full((), -(1 << 51), tl.int64)
    for phase in range(0, 2):
        counting = phase == 0
        if tl.where(counting, by_count, by_mass):
            low = least
            high = (ordered(highest).to(tl.int64) + 1) << 20
            middle = low
            target = tl.full((), 0, tl.int64)
            first = tl.full((), 1, tl.int32)
            while (high - low > 1) | (first == 1):
                sums = tl.zeros((_CHUNK,), tl.int64)
                for start in range(0, vocab_size, _CHUNK):
                    token, x, alive = _chunk(
                        start, logits_ptr, settings, counts_ptr, allowed_ptr, grammar_ptr,
                        grammar_rows_ptr, row64, slot, flags, stride_logits, stride_counts,
                        stride_allowed, stride_grammar, vocab_size, highest, skip,
                    )  # fmt: skip
                    amounts = tl.where(counting, 1, token_mass(x, highest))
                    above = alive & (places(x, token) >= middle)
                    sums += tl.where(above, amounts, 0)
                total = tl.sum(sums, axis=0)
                if first == 1:
                    target = tl.where(counting, top_k, _share(total, top_p))
                else:
                    enough = total >= target
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle)
                middle = low + ((high - low) >> 1)
                first = tl.full((), 0, tl.int32)
            least = low
    key_0, key_1, key_2 = row_keys(settings, position)
    score = tl.full((), -float("inf"), tl.float32)
    chosen = vocab_size + tl.full((), 0, tl.int32)
    for start in range(0, vocab_size, _CHUNK):
        token, x, alive = _chunk(
            start, logits_ptr, settings, counts_ptr, allowed_ptr, grammar_ptr, grammar_rows_ptr,
            row64, slot, flags, stride_logits, stride_counts, stride_allowed, stride_grammar,
            vocab_size, highest, skip,
        )  # fmt: skip
        kept = alive & (places(x, token) >= least)
        scores = drawn_scores(x, LOG2E, token_hashes(token), key_0, key_1, key_2)
        scores = tl.where(kept, scores, -float("inf"))
        best = tl.max(scores, axis=0)
        winner = tl.min(tl.where(kept & (scores == best), token, vocab_size), axis=0)
        chosen = tl.where(best > score, winner, chosen)
        score = tl.maximum(best, score)
    return chosen


@triton.jit
def _switch(words, ids, active, ON: tl.constexpr):
    bit = tl.full(ids.shape, 1, tl.int32) << (ids & 31)
    if ON:
        tl.atomic_or(words + (ids >> 5), bit, mask=active)
    else:
        tl.atomic_and(words + (ids >> 5), ~bit, mask=active)


@triton.jit
def _bar(words, settings, history, length, chosen):
    """Update which tokens may follow `chosen`, at `length` of the history."""
    record = record_of(settings)
    num_stops, num_words, width = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    stops, listed = record + HEADER, record + HEADER + num_stops
    start = tl.load(settings + PROMPT_LEN)
    early = length + 1 - start < tl.load(settings + MIN_TOKENS)
    lane = tl.arange(0, _LISTED)
    for first in range(0, num_words, _LISTED):
        active = first + lane < num_words
        last = tl.load(listed + (first + lane) * width + width - 1, mask=active, other=0)
        _switch(words, last, active, True)
    for first in range(0, num_stops, _LISTED):
        active = first + lane < num_stops
        _switch(words, tl.load(stops + first + lane, mask=active, other=0), active, True)
    tl.debug_barrier()
    for first in range(0, num_words, _LISTED):
        active = first + lane < num_words
        word = listed + (first + lane) * width
        matches = active
        for back in range(1, width):
            # The word's token `back` places before its last one, and the history's token there.
            wanted = tl.load(word + width - 1 - back, mask=active, other=-1)
            position = length + 1 - back
            is_output = position >= start
            stands = tl.load(history + position, mask=is_output & (back > 1), other=-2)
            stands = tl.where((back == 1) & is_output, chosen, stands)
            matches = matches & ((wanted < 0) | (wanted == stands))
        last = tl.load(word + width - 1, mask=active, other=0)
        _switch(words, last, matches, False)
    if early:
        for first in range(0, num_stops, _LISTED):
            active = first + lane < num_stops
            _switch(words, tl.load(stops + first + lane, mask=active, other=0), active, False)


@triton.jit
def _score(
    row_ptr,
    settings,
    chosen,
    row64,
    raw_ptr,
    limits_ptr,
    found_ptr,
    likely_values_ptr,
    likely_ids_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    logprob_ptr,
    rank_ptr,
    vocab_size,
    num_parts,
    MOST_LIKELY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute log-probabilities of the top tokens and the chosen one from the unedited logits."""
    part = tl.arange(0, BLOCK)
    inside = part < num_parts
    at = (row64 * num_parts + part) * 2
    tops = tl.load(raw_ptr + at, mask=inside, other=-float("inf"))
    sums = tl.load(raw_ptr + at + 1, mask=inside, other=0.0)
    top = tl.max(tops, axis=0)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = base + tl.log2(tl.sum(sums * tl.exp2((tops - base) * LOG2E), axis=0)) * _LN2
    own = tl.load(row_ptr + chosen).to(tl.float32)
    tl.store(logprob_ptr + row64, own - total)
    num = tl.load(settings + NUM_LOGPROBS)
    least = tl.load(limits_ptr + row64 * LIMITS + LIKELY_FLOOR)
    count = tl.load(found_ptr + row64 * FOUND + LIKELY)
    more_likely = tl.full((), 0, tl.int32)
    if count <= MOST_LIKELY:
        index = tl.arange(0, MOST_LIKELY)
        alive = index < count
        values = tl.load(
            likely_values_ptr + row64 * MOST_LIKELY + index, mask=alive, other=-float("inf")
        )
        ids = tl.load(likely_ids_ptr + row64 * MOST_LIKELY + index, mask=alive, other=vocab_size)
        more_likely = tl.sum((alive & (values > own)).to(tl.int32), axis=0)
        for place in range(0, tl.minimum(num, vocab_size)):
            best = tl.max(tl.where(alive, values, -float("inf")), axis=0)
            winner = tl.min(tl.where(alive & (values == best), ids, vocab_size), axis=0)
            tl.store(top_ids_ptr + place, winner)
            tl.store(top_logprobs_ptr + place, best - total)
            alive = alive & (ids != winner)
    else:
        below = tl.full((), (1 << 62), tl.int64)
        for place in range(0, tl.minimum(num, vocab_size)):
            first = tl.full((), _LOWEST, tl.int64)
            for start in range(0, vocab_size, _CHUNK):
                token = start + tl.arange(0, _CHUNK)
                within = token < vocab_size
                raw = tl.load(row_ptr + token, mask=within, other=-float("inf")).to(tl.float32)
                rank = tl.where(within, places(raw, token), _LOWEST)
                first = tl.maximum(first, tl.max(tl.where(rank < below, rank, _LOWEST), axis=0))
            winner = 0xFFFFF - (first & 0xFFFFF).to(tl.int32)
            value = tl.load(row_ptr + winner).to(tl.float32)
            tl.store(top_ids_ptr + place, winner)
            tl.store(top_logprobs_ptr + place, value - total)
            below = first
    if (count > MOST_LIKELY) | (own < least):
        larger = tl.zeros((_RANKED,), tl.int32)
        for start in range(0, vocab_size, _RANKED):
            token = start + tl.arange(0, _RANKED)
            raw = tl.load(row_ptr + token, mask=token < vocab_size, other=-float("inf"))
            larger += (raw.to(tl.float32) > own).to(tl.int32)
        more_likely = tl.sum(larger, axis=0)
    tl.store(rank_ptr + row64, more_likely + 1)


@triton.jit(
    do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr", "grammar_rows_ptr"],
    do_not_specialize=["num_rows", "skip"],
)
def choose_row_kernel(
    logits_ptr,
    settings_ptr,
    counts_ptr,
    allowed_ptr,
    grammar_ptr,
    grammar_rows_ptr,
    slots_ptr,
    lengths_ptr,
    history_ptr,
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
    chosen_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    logprob_ptr,
    rank_ptr,
    stride_logits,
    stride_settings,
    stride_counts,
    stride_allowed,
    stride_grammar,
    num_rows,
    vocab_size,
    num_parts,
    skip,
    stride_history,
    stride_top,
    CAPACITY: tl.constexpr,
    MOST_LIKELY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row64 = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row64)
    settings = settings_ptr + slot * stride_settings
    asked = tl.load(settings + FLAGS)
    flags = asked & ~skip
    if (flags & IDLE) == 0:
        length = tl.load(lengths_ptr + row64)
        chosen = length.to(tl.int32)
        if (flags & FORCED) == 0:
            part = tl.arange(0, BLOCK)
            filtered = (flags & FILTER) != 0
            at = row64 * num_parts + part
            best = tl.load(best_ptr + at, mask=part < num_parts, other=-float("inf"))
            highest = tl.max(best, axis=0)
            bad = (highest == float("inf")) | (highest == -float("inf"))
            if filtered:
                best = tl.load(won_ptr + at, mask=part < num_parts, other=-float("inf"))
            token = tl.load(token_ptr + at, mask=part < num_parts, other=vocab_size)
            score = tl.max(best, axis=0)
            chosen = tl.min(tl.where(best == score, token, vocab_size), axis=0)
            if filtered & (bad == 0):
                position = length.to(tl.int32)
                key_0, key_1, key_2 = row_keys(settings, position)
                sums = sums_ptr + row64 * SUMS
                alive_count, alive_mass = tl.load(sums), tl.load(sums + 1)
                sure_count, sure_mass = tl.load(sums + 2), tl.load(sums + 3)
                top_k = tl.load(settings + TOP_K).to(tl.int64)
                top_p = float_of(settings, TOP_P)
                by_count = top_k < alive_count
                by_mass = top_p < 1.0
                count = tl.load(found_ptr + row64 * FOUND + NEAR)
                fits = count <= CAPACITY
                if fits:
                    index = tl.arange(0, CAPACITY)
                    kept = index < count
                    x = tl.load(values_ptr + row64 * CAPACITY + index, mask=kept, other=highest)
                    ids = tl.load(ids_ptr + row64 * CAPACITY + index, mask=kept, other=0)
                    if by_count:
                        wanted = top_k - sure_count
                        fits = (wanted >= 1) & (wanted <= count)
                        if fits:
                            ones = tl.full((CAPACITY,), 1, tl.int32)
                            kept = _kept(x, ids, kept, ones, wanted)
                    if by_mass & fits:
                        masses = token_mass(x, highest)
                        present = tl.sum(tl.where(kept, masses, 0), axis=0)
                        total = tl.where(by_count, sure_mass + present, alive_mass)
                        wanted = _share(total, top_p) - sure_mass
                        fits = (wanted >= 1) & (wanted <= present)
                        if fits:
                            kept = _kept(x, ids, kept, masses, wanted)
                    if fits:
                        hashes = token_hashes(ids)
                        scores = drawn_scores(x, LOG2E, hashes, key_0, key_1, key_2)
                        scores = tl.where(kept, scores, -float("inf"))
                        nearby = tl.max(scores, axis=0)
                        winner = tl.min(
                            tl.where(kept & (scores == nearby), ids, vocab_size), axis=0
                        )
                        if (nearby > score) | ((nearby == score) & (winner < chosen)):
                            chosen = winner
                if fits == 0:
                    chosen = _in_passes(
                        logits_ptr, settings, counts_ptr, allowed_ptr, grammar_ptr,
                        grammar_rows_ptr, row64, slot, flags, stride_logits, stride_counts,
                        stride_allowed, stride_grammar, vocab_size, highest, by_count, by_mass,
                        position, skip,
                    )  # fmt: skip
            tl.store(chosen_ptr + row64, tl.where(bad, -1, chosen))
            chosen = tl.where(bad, 0, chosen)
            tl.store(history_ptr + slot * stride_history + length, chosen)
            if ((asked & PENALTIES) != 0) & (bad == 0):
                place = counts_ptr + slot * stride_counts + chosen
                known = tl.load(place).to(tl.int32)
                times = tl.minimum((known & 0x7FFF) + 1, 0x7FFF)
                tl.store(place, (times | (known & -32768)).to(tl.int16))
            if (asked & BANS) != 0:
                _bar(
                    allowed_ptr + slot * stride_allowed, settings,
                    history_ptr + slot * stride_history, length.to(tl.int32), chosen,
                )  # fmt: skip
        if (flags & LOGPROBS) != 0:
            _score(
                logits_ptr + row64 * stride_logits, settings, chosen, row64, raw_ptr, limits_ptr,
                found_ptr, likely_values_ptr, likely_ids_ptr, top_ids_ptr + row64 * stride_top,
                top_logprobs_ptr + row64 * stride_top, logprob_ptr, rank_ptr, vocab_size,
                num_parts, MOST_LIKELY, BLOCK,
            )  # fmt: skip

"""Sums over the ranks of one host, which write their terms into each other's memory.

A rank's *mailbox* is memory of its device that all ranks can write: for each program of a kernel
and each sender a place of its own, twice, used in turn. Which one is in use follows from the number
of the program's *round*, which it counts on the device, so that a recorded graph goes on counting.
A program that has the terms of round n + 1 knows that their senders have read those of round n, and
so that it may write there again.

Three ways, for small, larger and large terms:

- *words*: each 32 bits of a term travel with the number of the round in one store of 64 bits, so
  that a reader needs neither a fence nor a second message. Twice the bytes, the shortest wait.
- *one-shot*: the terms, a fence, and one flag a program; every rank adds all terms.
- *two-shot*: each rank adds a share of every tile and sends the sum: with more than two ranks fewer
  bytes, for one wait more.

Every way adds in the order of the ranks in float32, and the residual last, rounded once: all ranks
get the same bits.

Memory: reads and writes the term and the residual once, and sends the term to all other ranks
(two-shot: 2 (size - 1) / size of it). Bound by the link between the devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from .launch import launch
from .pdl import gdc_launch_dependents, gdc_wait, pdl_options

Way = Literal["words", "one_shot", "two_shot"]

WORD_PROGRAMS = 128
"""Most programs of the way `words`."""
WORD_TILE = 1024
"""Most 32-bit words of a term per program of the way `words`."""
TILE_PROGRAMS = 128
"""Most programs of the other two ways, each of which takes tiles in turn."""
TILE = 4096
"""32-bit words of a tile, at most; of the way `two_shot`, of each rank's share of it."""
SMALLEST_TILE = 512
SPINS = 4096
"""Polls of a mailbox between two checks of `stop`."""


@triton.jit
def _unpack(word, DTYPE: tl.constexpr):
    """Return the values of 32-bit words in float32: the first and, of 16-bit types, the second."""
    if DTYPE == tl.float32:
        value = word.to(tl.float32, bitcast=True)
        return value, value
    else:
        first = (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        second = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        return first, second


@triton.jit
def _pack(first, second, DTYPE: tl.constexpr):
    """Return 32-bit words of values in float32, each rounded to DTYPE."""
    if DTYPE == tl.float32:
        return first.to(tl.int32, bitcast=True)
    else:
        low = first.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = second.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        return low | (high << 16)


@triton.jit
def _add_words(first, second, word, DTYPE: tl.constexpr):
    """Return float32 sums of the first and second values of words, with `word`'s."""
    one, two = _unpack(word, DTYPE)
    return first + one, second + two


@triton.jit
def _rounded_sum(
    first, second, residual_ptr, at, mask, DTYPE: tl.constexpr, RESIDUAL: tl.constexpr
):
    if RESIDUAL:
        residual = tl.load(residual_ptr.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
        first, second = _add_words(first, second, residual, DTYPE)
    return _pack(first, second, DTYPE)


@triton.jit
def _give_up(stop_ptr, spins, SPINS: tl.constexpr):
    """Return whether the waiting has been ended from outside; looks once in SPINS calls."""
    stop = 0
    if spins % SPINS == 0:
        stop = tl.load(stop_ptr, volatile=True)
    return stop != 0


@triton.jit
def _words_kernel(
    out_ptr,
    x_ptr,
    residual_ptr,
    mailboxes_ptr,
    rounds_ptr,
    stop_ptr,
    num_words,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPINS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    at = program * BLOCK + offsets
    mask = at < num_words
    own = tl.load(mailboxes_ptr + RANK).to(tl.pointer_type(tl.int64))
    if PDL:
        gdc_wait()
    number = tl.load(rounds_ptr + program) + 1
    term = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
    message = (term.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    place = ((number & 1) * PROGRAMS + program) * SIZE * PLACE
    for step in tl.static_range(1, SIZE):
        peer = tl.load(mailboxes_ptr + (RANK + step) % SIZE).to(tl.pointer_type(tl.int64))
        tl.store(peer + place + RANK * PLACE + offsets, message, mask=mask)
    if PDL:
        gdc_launch_dependents()
    first = tl.zeros([BLOCK], dtype=tl.float32)
    second = tl.zeros([BLOCK], dtype=tl.float32)
    for source in tl.static_range(SIZE):
        word = term
        if source != RANK:
            ptrs = own + place + source * PLACE + offsets
            got = tl.load(ptrs, mask=mask, other=message, volatile=True)
            missing = tl.max(((got >> 32).to(tl.int32) != number).to(tl.int32), axis=0)
            spins = 0
            while missing != 0:
                got = tl.load(ptrs, mask=mask, other=message, volatile=True)
                missing = tl.max(((got >> 32).to(tl.int32) != number).to(tl.int32), axis=0)
                spins += 1
                if _give_up(stop_ptr, spins, SPINS):
                    missing = 0
            word = got.to(tl.int32)
        first, second = _add_words(first, second, word, DTYPE)
    total = _rounded_sum(first, second, residual_ptr, at, mask, DTYPE, RESIDUAL)
    tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + at, total, mask=mask)
    tl.store(rounds_ptr + program, number)


@triton.jit
def _raise_flag(ptr, number):
    """Store `number` once all that this program has stored can be seen by the other devices."""
    tl.debug_barrier()
    tl.atomic_xchg(ptr, number, sem="release", scope="sys")


@triton.jit
def _await_flag(ptr, number, stop_ptr, SPINS: tl.constexpr):
    """Wait until `number`, or a later one, and all stores before it are visible."""
    seen = tl.atomic_add(ptr, 0, sem="acquire", scope="sys")
    spins = 0
    while seen - number < 0:
        seen = tl.atomic_add(ptr, 0, sem="acquire", scope="sys")
        spins += 1
        if _give_up(stop_ptr, spins, SPINS):
            seen = number
    tl.debug_barrier()


@triton.jit
def _place_of(number, SIZE: tl.constexpr, PLACE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Return where this program's places of round `number` begin."""
    return ((number & 1) * PROGRAMS + tl.program_id(0)) * SIZE * PLACE


@triton.jit
def _send(
    mailboxes_ptr, peer, place, offsets, words, mask, RANK: tl.constexpr, PLACE: tl.constexpr
):
    mailbox = tl.load(mailboxes_ptr + peer).to(tl.pointer_type(tl.int32))
    tl.store(mailbox + place + RANK * PLACE + offsets, words, mask=mask)


@triton.jit
def _raise_flags(flags_ptr, number, RANK: tl.constexpr, SIZE: tl.constexpr):
    for step in tl.static_range(1, SIZE):
        there = tl.load(flags_ptr + (RANK + step) % SIZE).to(tl.pointer_type(tl.int32))
        _raise_flag(there + tl.program_id(0) * SIZE + RANK, number)


@triton.jit
def _received(
    own, flags, source, number, place, offsets, mask, stop_ptr,
    SIZE: tl.constexpr, PLACE: tl.constexpr, SPINS: tl.constexpr,
):  # fmt: skip
    _await_flag(flags + tl.program_id(0) * SIZE + source, number, stop_ptr, SPINS)
    ptrs = own + place + source * PLACE + offsets
    return tl.load(ptrs, mask=mask, other=0, cache_modifier=".cg")


@triton.jit
def _tiles_kernel(
    out_ptr,
    x_ptr,
    residual_ptr,
    mailboxes_ptr,
    flags_ptr,
    rounds_ptr,
    stop_ptr,
    num_words,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SPINS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The ways with flags, tile by tile. With TWO_SHOT a tile has SIZE shares of BLOCK words, and a
    round two messages: the terms of a share to the rank that adds it, and its sum to all."""
    SHARES: tl.constexpr = SIZE if TWO_SHOT else 1
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    own = tl.load(mailboxes_ptr + RANK).to(tl.pointer_type(tl.int32))
    flags = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32))
    if PDL:
        gdc_wait()
    number = tl.load(rounds_ptr + program)
    x = x_ptr.to(tl.pointer_type(tl.int32))
    out = out_ptr.to(tl.pointer_type(tl.int32))
    tile = program
    while tile * SHARES * BLOCK < num_words:
        base = tile * SHARES * BLOCK
        number += 1
        place = _place_of(number, SIZE, PLACE, PROGRAMS)
        at = base + (RANK * BLOCK if TWO_SHOT else 0) + offsets
        mask = at < num_words
        if not TWO_SHOT:
            term = tl.load(x + at, mask=mask, other=0)
        for step in tl.static_range(1, SIZE):
            owner = (RANK + step) % SIZE
            if TWO_SHOT:
                sent_at = base + owner * BLOCK + offsets
                sent = tl.load(x + sent_at, mask=sent_at < num_words, other=0)
                _send(mailboxes_ptr, owner, place, offsets, sent, sent_at < num_words, RANK, PLACE)
            else:
                _send(mailboxes_ptr, owner, place, offsets, term, mask, RANK, PLACE)
        _raise_flags(flags_ptr, number, RANK, SIZE)
        first = tl.zeros([BLOCK], dtype=tl.float32)
        second = tl.zeros([BLOCK], dtype=tl.float32)
        for source in tl.static_range(SIZE):
            if source != RANK:
                word = _received(
                    own, flags, source, number, place, offsets, mask, stop_ptr, SIZE, PLACE, SPINS
                )
            elif TWO_SHOT:
                word = tl.load(x + at, mask=mask, other=0)
            else:
                word = term
            first, second = _add_words(first, second, word, DTYPE)
        total = _rounded_sum(first, second, residual_ptr, at, mask, DTYPE, RESIDUAL)
        if TWO_SHOT:
            number += 1
            place = _place_of(number, SIZE, PLACE, PROGRAMS)
            for step in tl.static_range(1, SIZE):
                _send(mailboxes_ptr, (RANK + step) % SIZE, place, offsets, total, mask, RANK, PLACE)
            _raise_flags(flags_ptr, number, RANK, SIZE)
        tl.store(out + at, total, mask=mask)
        if TWO_SHOT:
            for step in tl.static_range(1, SIZE):
                source = (RANK + step) % SIZE
                at = base + source * BLOCK + offsets
                word = _received(
                    own, flags, source, number, place, offsets, at < num_words, stop_ptr, SIZE,
                    PLACE, SPINS,
                )  # fmt: skip
                tl.store(out + at, word, mask=at < num_words)
        tile += tl.num_programs(0)
    if PDL:
        gdc_launch_dependents()
    tl.store(rounds_ptr + program, number)


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def mailbox_words(size: int) -> int:
    return sum(_parts(size))


def _parts(size: int) -> tuple[int, int, int]:
    """Return the 64-bit words of a mailbox: of `words`, of the other ways' tiles, of flags."""
    words = 2 * WORD_PROGRAMS * size * WORD_TILE
    tiles = 2 * TILE_PROGRAMS * size * TILE // 2
    return words, tiles, triton.cdiv(TILE_PROGRAMS * size, 2)


@dataclass(frozen=True)
class Mailboxes:
    rank: int
    size: int
    words: torch.Tensor
    """[size] int64: addresses of the places of `words`, by rank."""
    tiles: torch.Tensor
    """[size] int64: addresses of the places of tiles."""
    flags: torch.Tensor
    """[size] int64: addresses of the flags of tiles."""
    word_rounds: torch.Tensor
    """[WORD_PROGRAMS] int32: rounds that each program of `words` has done."""
    tile_rounds: torch.Tensor
    stop: torch.Tensor
    """[1] int32 in pinned host memory: if not 0, all waiting ends and sums are undefined."""

    @classmethod
    def at(cls, rank: int, addresses: list[int], device: torch.device) -> Mailboxes:
        """addresses: of each rank's mailbox (`mailbox_words` of zeros), as `device` sees it."""
        size = len(addresses)
        words, tiles, _ = _parts(size)
        starts = torch.tensor(addresses, dtype=torch.int64)
        stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        return cls(
            rank=rank,
            size=size,
            words=starts.to(device),
            tiles=(starts + 8 * words).to(device),
            flags=(starts + 8 * (words + tiles)).to(device),
            word_rounds=torch.zeros(WORD_PROGRAMS, dtype=torch.int32, device=device),
            tile_rounds=torch.zeros(TILE_PROGRAMS, dtype=torch.int32, device=device),
            stop=stop,
        )

    def give_up(self) -> None:
        self.stop.fill_(1)


def peer_sum(
    x: torch.Tensor, residual: torch.Tensor | None, mailboxes: Mailboxes, way: Way
) -> torch.Tensor:
    """Return the sum of all ranks' `x`, plus the residual: [any] → the same shape.

    x, residual: contiguous, of one shape and one of DTYPES, a multiple of 4 bytes; the result is
    written into the residual, or else into `x`. Every rank calls it, with the same shape and way.
    `words` takes at most WORD_PROGRAMS * WORD_TILE * 4 bytes.
    """
    num_words = x.numel() * x.element_size() // 4
    if num_words == 0:
        return x if residual is None else residual
    out = x if residual is None else residual
    options = pdl_options(x.device)
    memory: tuple[torch.Tensor, ...]
    constants: dict[str, int]
    if way == "words":
        block = max(256, triton.next_power_of_2(triton.cdiv(num_words, WORD_PROGRAMS)))
        kernel, programs, num_warps = _words_kernel, triton.cdiv(num_words, block), block // 128
        memory = (mailboxes.words, mailboxes.word_rounds)
        constants = {"PLACE": WORD_TILE, "PROGRAMS": WORD_PROGRAMS}
    else:
        shares = mailboxes.size if way == "two_shot" else 1
        share = triton.next_power_of_2(triton.cdiv(num_words, TILE_PROGRAMS * shares))
        block = min(TILE, max(SMALLEST_TILE, share))
        programs = min(triton.cdiv(num_words, block * shares), TILE_PROGRAMS)
        kernel, num_warps = _tiles_kernel, max(2, min(8, block // 256))
        memory = (mailboxes.tiles, mailboxes.flags, mailboxes.tile_rounds)
        constants = {"PLACE": TILE, "PROGRAMS": TILE_PROGRAMS, "TWO_SHOT": way == "two_shot"}
    launch(kernel, (programs,))(
        out, x, residual, *memory, mailboxes.stop, num_words, DTYPE=DTYPES[x.dtype],
        RANK=mailboxes.rank, SIZE=mailboxes.size, BLOCK=block, SPINS=SPINS,
        RESIDUAL=residual is not None, PDL=bool(options), num_warps=num_warps, **constants,
        **options,
    )  # fmt: skip
    return out

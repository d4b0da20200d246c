"""Masking of logits: -inf, in place, where a token's bit is off.

Memory: reads the bits (vocab_size / 8 bytes per row), writes masked logits, reads no logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch

PART = 4096


@triton.jit
def _mask_tokens_kernel(
    logits_ptr,
    bits_ptr,
    slot_ptr,
    stride_logits,
    stride_bits,
    vocab_size,
    INDEXED: tl.constexpr,
    PART_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * PART_SIZE + tl.arange(0, PART_SIZE)
    inside = token < vocab_size
    word = tl.load(bits_ptr + row * stride_bits + (token >> 5), mask=inside, other=0)
    off = ((word >> (token & 31)) & 1) == 0
    target = tl.load(slot_ptr + row) if INDEXED else row
    never = tl.full((PART_SIZE,), -float("inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + target * stride_logits + token, never, mask=inside & off)


def mask_tokens(logits: torch.Tensor, bits: torch.Tensor, rows: torch.Tensor | None) -> None:
    """logits: [num_rows, vocab_size], any float type, last stride 1, changed in place; bits:
    [count, at least ceil(vocab_size / 32)] int32, token i at bit i % 32 of word i // 32; rows:
    [count] int64, the row of logits for each row of bits, all different; None: row by row.
    """
    vocab_size, count = logits.shape[1], bits.shape[0]
    if count == 0:
        return
    launch(_mask_tokens_kernel, (count, triton.cdiv(vocab_size, PART)))(
        logits,
        bits,
        rows if rows is not None else bits,
        logits.stride(0),
        bits.stride(0),
        vocab_size,
        INDEXED=rows is not None,
        PART_SIZE=PART,
        num_warps=4,
    )

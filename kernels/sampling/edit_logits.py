"""Logits with some of a slot's edits, in float32: the input of a plugin's logits processor.

Memory: reads the logits, writes twice as many bytes (for bfloat16).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from .layout import FLAGS, INVERSE_TEMPERATURE, float_of
from .logits import edited
from .sample_tokens import PART, Tables


@triton.jit(
    do_not_specialize=["edits", "scale"],
    do_not_specialize_on_alignment=["slots_ptr", "grammar_rows_ptr"],
)
def _edit_kernel(
    out_ptr,
    logits_ptr,
    settings_ptr,
    counts_ptr,
    allowed_ptr,
    grammar_ptr,
    grammar_rows_ptr,
    slots_ptr,
    stride_out,
    stride_logits,
    stride_settings,
    stride_counts,
    stride_allowed,
    stride_grammar,
    vocab_size,
    edits,
    scale,
    PART_SIZE: tl.constexpr,
):
    """One program per (part, row)."""
    first = tl.program_id(0) * PART_SIZE
    row64 = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row64)
    settings = settings_ptr + slot * stride_settings
    flags = tl.load(settings + FLAGS) & edits
    token = first + tl.arange(0, PART_SIZE)
    inside = token < vocab_size
    raw = tl.load(logits_ptr + row64 * stride_logits + token, mask=inside, other=-float("inf"))
    x = edited(
        raw.to(tl.float32), token, first, inside, row64, slot, flags, settings, counts_ptr,
        allowed_ptr, grammar_ptr, grammar_rows_ptr, stride_counts, stride_allowed, stride_grammar,
        vocab_size, PART_SIZE,
    )  # fmt: skip
    if scale != 0:
        x = x * float_of(settings, INVERSE_TEMPERATURE)
    tl.store(out_ptr + row64 * stride_out + token, x, mask=inside)


def edit_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tables: Tables,
    out: torch.Tensor,
    *,
    edits: int,
    scale: bool,
    grammar: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """logits: [num_rows, vocab_size], any float type, last stride 1; out: the same in float32, may
    be the same tensor; edits: the flags (layout.py) to apply; scale: apply the temperature, too;
    the other arguments as for `sample_tokens`.
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    bits, bit_rows = grammar if grammar is not None else (tables.allowed, slots)
    launch(_edit_kernel, (triton.cdiv(vocab_size, PART), num_rows))(
        out, logits, tables.settings, tables.counts, tables.allowed, bits, bit_rows, slots,
        out.stride(0), logits.stride(0), tables.settings.stride(0), tables.counts.stride(0),
        tables.allowed.stride(0), bits.stride(0), vocab_size, edits, int(scale),
        PART_SIZE=PART, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip

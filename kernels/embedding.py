"""Rows of an embedding, scaled, with rows of their positions added.

Memory: a row of each table read, a row written. Replaces up to five torch launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch
from .pdl import gdc_launch_dependents, gdc_wait, pdl_options

BLOCK = 2048


@triton.jit(
    do_not_specialize=["factor"],
    do_not_specialize_on_alignment=["token_ids_ptr", "positions_ptr"],
)
def _embedding_kernel(
    out_ptr,
    token_ids_ptr,
    weight_ptr,
    positions_ptr,
    position_weight_ptr,
    factor,
    stride_weight,
    stride_position,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK numbers of a token's row."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    if PDL:
        # In this order: the step's lengths and places are then written before any later kernel
        # begins, and the first attention reads them ahead of its own wait.
        gdc_wait()
        gdc_launch_dependents()
    start = tl.load(token_ids_ptr + row) * stride_weight
    x = tl.load(weight_ptr + start + offsets, mask=mask, other=0.0)
    if SCALED:
        x = (x.to(tl.float32) * factor).to(weight_ptr.dtype.element_ty)
    if PLACED:
        start = tl.load(positions_ptr + row) * stride_position
        position = tl.load(position_weight_ptr + start + offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + position.to(tl.float32)).to(weight_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + offsets, x, mask=mask)


def embed(
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    factor: float = 1.0,
    positions: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """token_ids: [num_tokens] int64; weight: [num_embeddings, hidden_size], last stride 1 →
    [num_tokens, hidden_size].

    factor: of the rows, rounded after it; positions: [num_tokens] int64, and a table of the
    weight's type, last stride 1, whose rows are added. No number may lie outside of its table.
    """
    num_tokens, size = token_ids.shape[0], weight.shape[1]
    out = torch.empty((num_tokens, size), dtype=weight.dtype, device=weight.device)
    if num_tokens == 0:
        return out
    places, table = positions or (None, None)
    block = min(triton.next_power_of_2(size), BLOCK)
    options = pdl_options(weight.device)
    launch(_embedding_kernel, (num_tokens, triton.cdiv(size, block)))(
        out,
        token_ids,
        weight,
        places,
        table,
        factor,
        weight.stride(0),
        0 if table is None else table.stride(0),
        SIZE=size,
        SCALED=factor != 1.0,
        PLACED=table is not None,
        BLOCK=block,
        PDL=bool(options),
        num_warps=max(block // 512, 1),
        enable_fp_fusion=False,
        **options,
    )
    return out

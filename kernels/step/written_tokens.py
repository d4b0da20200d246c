"""A step's tokens, written to the host's memory by the step itself.

Memory: four bytes per row, over the host's bus.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_wait, pdl_options

_BLOCK = tl.constexpr(256)


@triton.jit(do_not_specialize=["num_rows", "places", "last", "stride_ring"])
def _written_tokens_kernel(
    ring_ptr,
    runs_ptr,
    chosen_ptr,
    num_rows,
    places,
    last,
    stride_ring,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    run = tl.load(runs_ptr)
    run = tl.where(run == last, 0, run + 1)
    place = ring_ptr + (run % places) * stride_ring
    for start in range(0, num_rows, _BLOCK):
        row = start + tl.arange(0, _BLOCK)
        chosen = tl.load(chosen_ptr + row, mask=row < num_rows, other=0)
        tl.store(place + 1 + row, chosen, mask=row < num_rows)
    tl.store(place, run)
    tl.store(runs_ptr, run)


def write_tokens(chosen: torch.Tensor, runs: torch.Tensor, ring: torch.Tensor, last: int) -> None:
    """See `core.nn.operations.Operations.write_tokens`, whose arguments these are."""
    options = pdl_options(chosen.device)
    launch(_written_tokens_kernel, (1,))(
        ring,
        runs,
        chosen,
        chosen.shape[0],
        ring.shape[0],
        last,
        ring.stride(0),
        PDL=bool(options),
        num_warps=4,
        **options,
    )

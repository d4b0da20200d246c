"""Repacks e2m1, the 4-bit floats of MXFP4 and NVFP4.

Checkpoints have two of them to a byte, the earlier one in the low half. They stay in 4 bits if a
row's groups fit the kernels' runs of words; otherwise, or with implausibly large scales, they are
stored exactly as e4m3.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ...core.nn.quantized_weight import (
    E2M1,
    E2M1_LARGEST_SCALE,
    QuantizedWeight,
    e2m1_run,
    pack_e2m1,
)

logger = logging.getLogger("jackfield.loading")
CHUNK = 1 << 26
"""Numbers repacked at a time: temporaries take some bytes each."""


def pack_floats(
    layer: str, shards: Sequence[torch.Tensor], scale: torch.Tensor, group_size: int
) -> QuantizedWeight:
    """Stack shards, each [rows, K / 2] uint8 on any device, on the scales' device.

    layer: its name, for the log; scale: [K / group_size, N] float, of all rows.
    """
    size, total = 2 * shards[0].shape[1], scale.shape[1]
    run = e2m1_run(size, group_size)
    reason = f"rows of {size} columns, {group_size} to a scale, do not fit the kernels' words"
    if scale.abs().max() > E2M1_LARGEST_SCALE:
        run, reason = None, f"a scale is above {E2M1_LARGEST_SCALE:g}"
    if run is None:
        logger.info("%s: 4-bit floats are held in 8 bits, without loss: %s", layer, reason)
        values = torch.empty(total, size, dtype=torch.uint8, device=scale.device)
    else:
        values = torch.empty(total, size // 8, dtype=torch.int32, device=scale.device)
    wide, start = _e4m3().to(scale.device), 0
    for shard in shards:
        for numbers in torch.split(shard, max(CHUNK // size, 1)):
            codes = _codes(numbers.to(scale.device))
            place = values[start : start + len(codes)]
            place.copy_(wide[codes.int()] if run is None else pack_e2m1(codes, run))
            start += len(codes)
    if run is None:
        return QuantizedWeight(values.view(torch.float8_e4m3fn), scale, group_size)
    return QuantizedWeight(values, scale, group_size, bits=4, e2m1_run=run)


def _codes(numbers: torch.Tensor) -> torch.Tensor:
    """[rows, K / 2] uint8 → [rows, K] in [0, 16)"""
    return torch.stack([numbers & 15, numbers >> 4], dim=2).flatten(1)


def _e4m3() -> torch.Tensor:
    """[16] uint8: the bits of each number as e4m3"""
    return torch.tensor(E2M1).to(torch.float8_e4m3fn).view(torch.uint8)

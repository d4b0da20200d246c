"""How kernels see a linear layer of many experts: one weight, dense or packed, its rows stacked."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
import triton

from .packed_weight import Packed, largest_tile

Bank: TypeAlias = torch.Tensor | Packed
"""[num_experts * rows, size], an expert's rows side by side; last stride 1."""


class BankArguments(NamedTuple):
    """What a kernel is launched with."""

    tensors: tuple[torch.Tensor | None, ...]
    """Values, scale, zero"""
    strides: tuple[int, int, int]
    """Theirs, from row to row"""
    constants: dict[str, Any]


def bank_arguments(bank: Bank) -> BankArguments:
    """For values_ptr, scale_ptr, zero_ptr; stride_values, stride_scale, stride_zero; and names."""
    if not isinstance(bank, Packed):
        plain = {"WIDTH": bank.shape[1], "PARTS": 1, "BITS": 8, "GROUP_SIZE": bank.shape[1],
                 "SCALE_ROWS": 1, "OFFSET": 0, "PACKED": False, "GROUPED": False,
                 "ZERO": False}  # fmt: skip
        return BankArguments((bank, None, None), (bank.stride(0), 0, 0), plain)
    zero = bank.zero
    return BankArguments(
        (bank.values, bank.scale, zero),
        (bank.values.stride(0), bank.scale.stride(0), 0 if zero is None else zero.stride(0)),
        {"WIDTH": int(bank.values.shape[1]), "PARTS": bank.parts, "BITS": bank.bits,
         "GROUP_SIZE": bank.group_size, "SCALE_ROWS": bank.scale_rows, "OFFSET": bank.offset,
         "PACKED": True, "GROUPED": bank.grouped, "ZERO": zero is not None},
    )  # fmt: skip


def values_of(bank: Bank) -> torch.Tensor:
    """[num_experts * rows, width], elements or words."""
    return bank.values if isinstance(bank, Packed) else bank


def tile_of(bank: Bank, wanted: int) -> int:
    """Elements of a row to take at a time: a power of two up to `wanted`, preferably one that
    divides the row, and within one group."""
    width = int(values_of(bank).shape[1])
    if isinstance(bank, Packed) and bank.grouped:
        return largest_tile(bank, wanted)
    even = min(width & -width, wanted)
    return even if 4 * even >= wanted else min(wanted, triton.next_power_of_2(width))

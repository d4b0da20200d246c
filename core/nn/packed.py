"""A quantized weight as the operations read it: a few layouts, to which formats are repacked.

A format's plugin converts its checkpoints' tensors to a `PackedWeight` once, at load, so that
`Operations.packed_linear` does not depend on the format.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

WORD_BITS = 32
FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""


class PackedWeight(NamedTuple):
    """W[n, k] = (value[n, k] - zero[g, n]) * scale[g, n // scale_rows], g = k // group_size.

    N = out_features, K = in_features, G = ceil(K / group_size).
    """

    values: torch.Tensor
    """[N, K] float8_e4m3fn or int8, or [N, K * bits / 32] int32 words of unsigned numbers: part i
    (from the low bits) of word j is column i * K * bits / 32 + j."""
    scale: torch.Tensor
    """[G, ceil(N / scale_rows)] float"""
    group_size: int
    """Columns that share a scale; K: the whole row."""
    zero: torch.Tensor | None = None
    """[G, N] uint8; None: 0, and for words 2 ** (bits - 1)."""
    scale_rows: int = 1
    """Rows that share a scale."""
    bits: int = 8
    order: torch.Tensor | None = None
    """[K] int64: column k is multiplied by input order[k]; None: by input k."""
    inputs: Literal["wide", "quantized"] = "wide"
    """Whether inputs may be rounded to the weight's type (per token) where that is faster."""
    input_scale: torch.Tensor | None = None
    """[1] float32: the scale that inputs are rounded with; None: each token's own."""

    @property
    def out_features(self) -> int:
        return int(self.values.shape[0])

    @property
    def in_features(self) -> int:
        parts = WORD_BITS // self.bits if self.is_words else 1
        return int(self.values.shape[1]) * parts

    @property
    def is_words(self) -> bool:
        """Whether several numbers share an int32."""
        return self.values.dtype == torch.int32

    def rows(self, indices: torch.Tensor) -> PackedWeight:
        """Return the rows `indices`, [num_rows] int64, as a separate weight."""
        scale = self.scale[:, indices // self.scale_rows]
        zero = None if self.zero is None else self.zero[:, indices]
        return self._replace(values=self.values[indices], scale=scale, zero=zero, scale_rows=1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields that are tensors, by name."""
        tensors_by_name = {name: getattr(self, name) for name in self._fields}
        return {
            name: part for name, part in tensors_by_name.items() if isinstance(part, torch.Tensor)
        }


def pack_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[N, K] integers in [0, 2 ** bits), K a multiple of 32 / bits → [N, K * bits / 32] int32."""
    parts = values.chunk(WORD_BITS // bits, dim=1)
    words = torch.zeros_like(parts[0], dtype=torch.int64)
    for index, part in enumerate(parts):
        words |= part.to(torch.int64) << (index * bits)
    # From 2 ** 31 on, the same bits are a negative int32.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `pack_words`: → [N, K] int32."""
    mask = (1 << bits) - 1
    return torch.cat([(words >> (i * bits)) & mask for i in range(WORD_BITS // bits)], dim=1)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """→ [N, K] in `dtype`, columns in the order of the inputs; computed in float32."""
    columns = torch.arange(weight.in_features, device=weight.values.device) // weight.group_size
    if weight.is_words:
        values = unpack_words(weight.values, weight.bits).float()
        if weight.zero is None:
            values -= float(1 << (weight.bits - 1))
    else:
        values = weight.values.float()
    if weight.zero is not None:
        values -= weight.zero.t().float()[:, columns]
    scale = weight.scale.t().float().repeat_interleave(weight.scale_rows, dim=0)
    wide = values * scale[: weight.out_features, columns]
    if weight.order is not None:
        unsorted = torch.empty_like(wide)
        unsorted[:, weight.order] = wide
        wide = unsorted
    return wide.to(dtype)


def round_to_fp8(weight: torch.Tensor, *, dim: int | None = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] float → ([N, K] float8_e4m3fn, [N] float32), one scale per row; `dim=None`: one.

    The largest magnitude becomes the format's largest. A row of zeros gets the scale 1.
    """
    wide = weight.float()
    largest = wide.abs().amax() if dim is None else wide.abs().amax(dim=dim)
    scale = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    scale = scale.expand(weight.shape[0]).contiguous()
    rounded = (wide / scale[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return rounded, scale


def round_to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] float → ([N, K] int8, [N] float32), symmetric, one scale per row."""
    wide = weight.float()
    largest = wide.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    return (wide / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def round_to_words(
    weight: torch.Tensor, bits: int, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] float → ([N, K * bits / 32] int32, scale [G, N] of the weight's type), symmetric.

    The scale maps a group's largest magnitude to half a step beyond the largest number, so that
    both ends of the range are used: 2 * max / (2 ** bits - 1).
    """
    rows, size = weight.shape
    groups = -(-size // group_size)
    wide = torch.nn.functional.pad(weight.float(), (0, groups * group_size - size))
    wide = wide.view(rows, groups, group_size)
    largest = wide.abs().amax(dim=2)
    scale = torch.where(largest > 0, 2 * largest / ((1 << bits) - 1), torch.ones_like(largest))
    scale = scale.to(weight.dtype)
    half = 1 << (bits - 1)
    rounded = (wide / scale[:, :, None].float()).round_().clamp_(-half, half - 1) + half
    words = pack_words(rounded.view(rows, -1)[:, :size], bits)
    return words, scale.t().contiguous()

"""A quantized weight as the operations read it: a few layouts, to which formats are repacked.

A format's plugin converts its checkpoints' tensors to a `QuantizedWeight` once, at load, so that
`Operations.quantized_linear` does not depend on the format.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

WORD_BITS = 32
FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""4-bit floats, by their bits: three of a magnitude, and the highest the sign."""
E2M1_PARTS = WORD_BITS // 4
E2M1_SMALLEST_RUN = 16
E2M1_SIGNS = (14, 12, 15, 13)
"""Bit of each sign in half a word of `pack_e2m1`."""
E2M1_LARGEST_SCALE = 2.0
"""Kernels multiply scales by up to 2 ** 126."""


class QuantizedWeight(NamedTuple):
    """W[n, k] = (value[n, k] - zero[g, n]) * scale[g, n // scale_rows], g = k // group_size.

    N = out_features, K = in_features, G = ceil(K / group_size).
    """

    values: torch.Tensor
    """[N, K] float8_e4m3fn or int8, or [N, K * bits / 32] int32 words of unsigned numbers: part i
    (from the low bits) of word j is column i * K * bits / 32 + j. Of 4-bit floats: `pack_e2m1`."""
    scale: torch.Tensor
    """[G, ceil(N / scale_rows)] float"""
    group_size: int
    """Columns that share a scale; K: the whole row."""
    zero: torch.Tensor | None = None
    """[G, N] uint8; None: 0, and for words 2 ** (bits - 1)."""
    scale_rows: int = 1
    """Rows that share a scale."""
    bits: int = 8
    e2m1_run: int | None = None
    """Of words that hold 4-bit floats: how many are side by side. Their scales are at most
    E2M1_LARGEST_SCALE. None: integers."""
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
        return int(self.values.shape[1]) * self.pack_factor

    @property
    def pack_factor(self) -> int:
        """Columns per element of `values`."""
        return WORD_BITS // self.bits if self.is_words else 1

    @property
    def grouped(self) -> bool:
        """Whether a row has several scales."""
        return self.group_size < self.in_features

    @property
    def is_words(self) -> bool:
        """Whether several numbers share an int32."""
        return self.values.dtype == torch.int32

    def rows(self, indices: torch.Tensor) -> QuantizedWeight:
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


def e2m1_run(size: int, group_size: int) -> int | None:
    """Return the words of a run for rows of `size` 4-bit floats, such that each part is in one
    group; None: there is no such number that a matrix unit can take."""
    run = group_size
    while size % E2M1_PARTS == 0 and run >= E2M1_SMALLEST_RUN:
        rest = size // E2M1_PARTS % run
        if rest == 0 or run % rest == 0:
            return run
        run //= 2
    return None


def pack_e2m1(codes: torch.Tensor, run: int) -> torch.Tensor:
    """[N, K] 4-bit floats as integers in [0, 16) → [N, K / 8] int32.

    A row's words come in runs of so many, the last of which may be shorter: part i of word j of a
    run of n words, which begins with word r, is column 8 * r + i * n + j, so that neighbouring
    words hold, part by part, neighbouring columns of one group. Each half of a word has the
    magnitudes of four parts in its low 12 bits, and then their signs, at E2M1_SIGNS: so placed,
    half of the signs and magnitudes get to their places in a 16-bit float by one common shift.
    """
    parts = _parts_by_run(codes, run)
    words = torch.zeros_like(parts[:, 0], dtype=torch.int32)
    for part in range(E2M1_PARTS):
        magnitude, sign = _places(part)
        number = parts[:, part].to(torch.int32)
        words |= (number & 7) << magnitude | number >> 3 << sign
    return words


def unpack_e2m1(words: torch.Tensor, run: int) -> torch.Tensor:
    """Undo `pack_e2m1`: → [N, K] int32."""
    places = map(_places, range(E2M1_PARTS))
    parts = [(words >> size & 7) | (words >> sign & 1) << 3 for size, sign in places]
    return _columns_by_run(torch.stack(parts, dim=1), run)


def _places(part: int) -> tuple[int, int]:
    """Return the lowest bit of a part's magnitude, and that of its sign."""
    half, place = 16 * (part // 4), part % 4
    return half + 3 * place, half + E2M1_SIGNS[place]


def _parts_by_run(columns: torch.Tensor, run: int) -> torch.Tensor:
    """[N, K] → [N, 8, K / 8]: part by part, in the order of words"""
    rows, size = columns.shape
    whole = size // E2M1_PARTS // run * run
    runs, rest = columns.split([E2M1_PARTS * whole, size - E2M1_PARTS * whole], dim=1)
    runs = runs.reshape(rows, -1, E2M1_PARTS, run).transpose(1, 2).reshape(rows, E2M1_PARTS, whole)
    return torch.cat([runs, rest.reshape(rows, E2M1_PARTS, -1)], dim=2)


def _columns_by_run(parts: torch.Tensor, run: int) -> torch.Tensor:
    """Undo `_parts_by_run`."""
    rows, _, width = parts.shape
    runs, rest = parts.split([width // run * run, width % run], dim=2)
    runs = runs.reshape(rows, E2M1_PARTS, -1, run).transpose(1, 2)
    return torch.cat([runs.reshape(rows, -1), rest.reshape(rows, -1)], dim=1)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """→ [N, K] in `dtype`, columns in the order of the inputs; computed in float32."""
    columns = torch.arange(weight.in_features, device=weight.values.device) // weight.group_size
    if weight.e2m1_run is not None:
        numbers = torch.tensor(E2M1, device=weight.values.device)
        values = numbers[unpack_e2m1(weight.values, weight.e2m1_run)]
    elif weight.is_words:
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

"""A layer's blocks as a level of the cache fills them (`core.cache.levels`).

A block of keys, or of values, has the same bytes whatever its level: of a quantized one the codes
of its tokens come first, [tokens, num_kv_heads, width], then the scale and zero of each head,
[num_kv_heads, tokens] int32. Both are as in `quantized_cache`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...cache.level_options import WHOLE, LevelFormat
from .quantized_cache import dequantize, quantize

LATENT_GROUP = 64
"""Most channels of a latent that have a scale and a zero together."""


def latent_group(latent_dim: int, rope_dim: int) -> int:
    """Return how many channels of a latent's entry count as a head of a level, with a scale and a
    zero: none of them has channels of both parts, whose sizes differ.
    """
    return math.gcd(latent_dim, rope_dim, LATENT_GROUP)


class LevelPart(NamedTuple):
    """All blocks of one cache's keys, or values, as one level would have them."""

    codes: torch.Tensor
    """[num_blocks, tokens, num_kv_heads, width]; of a whole level the numbers themselves."""
    words: torch.Tensor | None
    """[num_blocks, num_kv_heads, tokens] int32; None: whole."""
    bits: int

    @classmethod
    def of(cls, part: torch.Tensor, form: LevelFormat) -> LevelPart:
        """part: [num_blocks, block_size, num_kv_heads, head_dim], contiguous"""
        if form.bits == WHOLE:
            return cls(part, None, WHOLE)
        num_blocks, _, heads, head_dim = part.shape
        width, tokens = head_dim * form.bits // 8, form.tokens
        flat = part.view(num_blocks, -1)
        codes = flat.view(torch.int8 if form.bits == 8 else torch.uint8)
        size = codes.shape[1]
        first = tokens * heads * width
        words = flat.view(torch.int32)
        return cls(
            codes[:, :first].unflatten(1, (tokens, heads, width)),
            words.as_strided(
                (num_blocks, heads, tokens), (size // 4, tokens, 1),
                words.storage_offset() + first // 4,
            ),
            form.bits,
        )  # fmt: skip

    def read(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """blocks: [N] int64 → [N * tokens, num_kv_heads, head_dim]"""
        return read_parts([self], blocks, dtype)[0]

    def write(self, x: torch.Tensor, blocks: torch.Tensor, first: int) -> None:
        """Append tokens, x: [n, num_kv_heads, head_dim], from place `first` of these blocks on,
        [N] int64.
        """
        write_parts([self], x[None], blocks, first)


def read_parts(
    parts: Sequence[LevelPart], blocks: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Read the same blocks, [N] int64, of several parts that are alike: [len(parts), N * tokens,
    num_kv_heads, head_dim] of `dtype`.
    """
    codes = torch.stack([part.codes.index_select(0, blocks) for part in parts])
    words = [part.words.index_select(0, blocks) for part in parts if part.words is not None]
    if words:
        codes = dequantize(codes, torch.stack(words).transpose(2, 3).contiguous())
    return codes.to(dtype).flatten(1, 2)


def write_parts(
    parts: Sequence[LevelPart], x: torch.Tensor, blocks: torch.Tensor, first: int
) -> None:
    """Append tokens to several parts that are alike, x: [len(parts), n, num_kv_heads, head_dim],
    from place `first` of these blocks on, [N] int64.
    """
    tokens, bits = parts[0].codes.shape[1], parts[0].bits
    places = torch.arange(first, first + x.shape[1], device=x.device)
    blocks, places = blocks[places // tokens], places % tokens
    codes, words = (x, None) if bits == WHOLE else quantize(x, bits)
    for number, part in enumerate(parts):
        part.codes[blocks, places] = codes[number].to(part.codes.dtype)
        if words is not None and part.words is not None:
            part.words[blocks, :, places] = words[number]

"""A layer's blocks as a level of the cache fills them (`core.cache.levels`).

A block of keys, or of values, has the same bytes whatever its level: of a quantized one the codes
of its tokens come first, [tokens, num_kv_heads, width], then the scale and zero of each head,
[num_kv_heads, tokens] int32. Both are as in `quantized_cache`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...cache.level_options import WHOLE, LevelFormat
from .quantized_cache import dequantize, quantize


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
        codes = self.codes.index_select(0, blocks)
        if self.words is None:
            return codes.flatten(0, 1)
        words = self.words.index_select(0, blocks).transpose(1, 2).contiguous()
        return dequantize(codes, words).to(dtype).flatten(0, 1)

    def write(self, x: torch.Tensor, blocks: torch.Tensor, first: int) -> None:
        """Append tokens, x: [n, num_kv_heads, head_dim], from place `first` of these blocks on,
        [N] int64."""
        tokens = self.codes.shape[1]
        places = torch.arange(first, first + len(x), device=x.device)
        blocks, places = blocks[places // tokens], places % tokens
        if self.words is None:
            self.codes[blocks, places] = x.to(self.codes.dtype)
            return
        codes, words = quantize(x, self.bits)
        self.codes[blocks, places] = codes
        self.words[blocks, :, places] = words

"""Which other key each key resembles, against plain torch."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.kernels.compaction.key_pairs import MAX_TILE, most_similar, newest_similar

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16 if GPU else torch.float16]
SHAPES = [(5, 1, 16), (300, 2, 24), (9 * MAX_TILE + 3, 1, 16)]
"""Tokens (in a tile; in three; in more than a program looks at without a stop), heads, channels."""


def directions(keys: torch.Tensor) -> torch.Tensor:
    return F.normalize(keys.float(), dim=2).transpose(0, 1)


def keys_of(shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Keys of which many resemble others; one has no length; not contiguous."""
    draw = torch.Generator().manual_seed(shape[0])
    tokens, heads, dim = shape
    themes = torch.randn(1 + tokens // 3, heads, 2 * dim, generator=draw)
    which = torch.randint(len(themes), (tokens,), generator=draw)
    keys = themes[which] + 0.3 * torch.randn(tokens, heads, 2 * dim, generator=draw)
    keys[tokens // 2] = 0.0
    return keys.to(DEVICE, dtype)[:, :, :dim]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_newest_similar_key(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    keys = keys_of(shape, dtype)
    found = newest_similar(keys, 0.8).long()
    cosines = directions(keys) @ directions(keys).transpose(1, 2)
    cosines.diagonal(dim1=1, dim2=2).fill_(0.0)
    order = torch.arange(shape[0], device=DEVICE)
    # Cosines at the bound may fall on either side of it.
    least, most = (torch.where(cosines > 0.8 + d, order, -1).amax(2) for d in (1e-5, -1e-5))
    assert ((found == least) | (found == most)).all()
    assert (found >= 0).any() and (found[:, shape[0] // 2] == -1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_most_similar_key(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    keys = keys_of(shape, dtype)
    others = keys[1::2].contiguous()
    cosine, index = most_similar(keys, others)
    cosines = directions(keys) @ directions(others).transpose(1, 2)
    torch.testing.assert_close(cosine, cosines.amax(2), atol=1e-5, rtol=1e-5)
    chosen = cosines.gather(2, index[:, :, None])[:, :, 0]
    torch.testing.assert_close(chosen, cosines.amax(2), atol=1e-5, rtol=1e-5)

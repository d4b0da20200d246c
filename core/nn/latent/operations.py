"""Operations on latents, in plain torch: a part of `Operations`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LatentTokens(NamedTuple):
    """A step's tokens, ready for latent attention."""

    query: torch.Tensor
    """[T, num_heads, nope_dim + rope_dim], the last `rope_dim` channels rotated"""
    latent: torch.Tensor
    """[T, latent_dim + rope_dim]: what the cache got"""


class LatentOperations:
    """T tokens. Sums are float32."""

    def cached_latents(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        interleaved: bool,
    ) -> LatentTokens:
        """Norm latents, rotate what comes after them and the same channels of queries, and write
        latents to the cache.

        query: [T, num_heads, nope_dim + rope_dim]; latent: [T, latent_dim + rope_dim], may be a
        view of a wider tensor; both may be overwritten. weight: [latent_dim], of an RMSNorm;
        positions: [T]; cos_sin: [max_positions, rope_dim] float32, cosines then sines, None without
        rotation; cache: [num_blocks, block_size, latent_dim + rope_dim]; slot_mapping: [T] int64.
        `interleaved`: pairs that are rotated are neighbours; otherwise each is of both halves.
        """
        latent_dim = weight.shape[0]
        wide = latent[:, :latent_dim].float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        key = latent[:, latent_dim:]
        if cos_sin is not None:
            rotation = cos_sin[positions]
            nope_dim = query.shape[-1] - key.shape[-1]
            turned = rotate_pairs(query[..., nope_dim:], rotation[:, None], interleaved)
            query = torch.cat([query[..., :nope_dim], turned], dim=-1)
            key = rotate_pairs(key, rotation, interleaved)
        normed = (weight * wide.to(weight.dtype)).to(latent.dtype)
        entries = torch.cat([normed, key], dim=-1)
        cache.flatten(0, 1).index_copy_(0, slot_mapping, entries.to(cache.dtype))
        return LatentTokens(query, entries)


def rotate_pairs(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate all channels, in float32; see `LatentOperations.cached_latents`.

    x: [..., rope_dim]; cos_sin: float32, of a shape that broadcasts to x's → the same shape
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    wide = x.float()
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
    return torch.cat(turned, dim=-1).to(x.dtype)

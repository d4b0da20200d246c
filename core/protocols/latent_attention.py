"""The contract of latent attention backends: one vector a token, which all heads share."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from .attention import LayerSpec, PagedBackend

if TYPE_CHECKING:
    import torch


class LatentAttentionSpec(LayerSpec, frozen=True, kw_only=True):
    """Parameters of one layer's latent attention (DeepSeek-V2, arXiv 2405.04434).

    A token's entry in the cache is its latent, which `up` makes every head's key and value from,
    and after it a rotated part of the key that all heads have in common.
    """

    num_heads: int
    """Of this rank; every rank has the whole cache."""
    latent_dim: int
    """Channels of the latent."""
    rope_dim: int
    """Channels of the key's part that all heads share; may be 0."""
    nope_dim: int
    """Channels of a head's own part of the key, which is not rotated."""
    value_dim: int
    """Channels of a head's value."""
    scale: float

    @property
    def key_dim(self) -> int:
        """Channels of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """Numbers cached per token."""
        return self.latent_dim + self.rope_dim


class LatentAttentionBackend(PagedBackend):
    """Causal attention over a paged cache of latents, prefill and decode rows in one batch.

    The cache of one layer is [num_blocks, block_size, latent_dim + rope_dim]; the step's tokens are
    written to it before `forward` is called. To test a backend:
    `jackfield.plugins.conformance.latent_attention`.
    """

    @classmethod
    @abstractmethod
    def supports(
        cls, spec: LatentAttentionSpec, device: torch.device, dtype: torch.dtype
    ) -> str | None:
        """As `PagedBackend.supports`."""

    @abstractmethod
    def forward(
        self,
        spec: LatentAttentionSpec,
        query: torch.Tensor,
        latent: torch.Tensor,
        up: torch.Tensor,
        cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """Attend to the cache.

        query: [num_tokens, num_heads, nope_dim + rope_dim], the last `rope_dim` rotated; latent:
        [num_tokens, latent_dim + rope_dim], the step's entries of the cache; up: [num_heads,
        nope_dim + value_dim, latent_dim], of each head the weights of its key's own part, then of
        its value → [num_tokens, num_heads, value_dim]
        """

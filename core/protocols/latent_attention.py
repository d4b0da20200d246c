"""The contract of latent attention backends: one vector a token, which all heads share."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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
    index_topk: int | None = None
    """Most tokens that a query reads: those that `forward` gets as `chosen` (DeepSeek Sparse
    Attention); None: all up to its own."""

    @property
    def key_dim(self) -> int:
        """Channels of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """Numbers cached per token."""
        return self.latent_dim + self.rope_dim


class ChosenTokens(NamedTuple):
    """The cached tokens that each query of a step reads, its own among them or not."""

    slots: torch.Tensor
    """[num_tokens, index_topk] int32: block * block_size + offset of each, in the order of the
    text; after the last one 0, which is in the null block."""
    counts: torch.Tensor
    """[num_tokens] int32: the number of each query's, at least 1."""


class LatentAttentionBackend(PagedBackend):
    """Causal attention over a paged cache of latents, prefill and decode rows in one batch.

    The cache of one layer is [num_blocks, block_size, latent_dim + rope_dim]; the step's tokens are
    written to it before `forward` is called. To test a backend:
    `jackfield.plugins.conformance.latent_attention`.
    """

    compacted_cache: ClassVar[bool] = False
    """Whether `forward` serves rows whose cache was compacted (`EngineConfig.kv_compression`): it
    has fewer tokens than the sequence, in their order. A row's tokens are the last of those that
    `seq_lens` counts; nothing follows from positions."""

    leveled_cache: ClassVar[bool] = False
    """Whether `forward` serves rows that have latents in fewer bits before those of their sequence
    (`BatchLayout.levels`): all queries of a row see all of them. In blocks of levels, so many
    channels count as a head as `core.nn.kv_cache.level_cache.latent_group` says. Needs
    `compacted_cache`."""

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
        *,
        chosen: ChosenTokens | None = None,
    ) -> torch.Tensor:
        """Attend to the cache.

        query: [num_tokens, num_heads, nope_dim + rope_dim], the last `rope_dim` rotated; latent:
        [num_tokens, latent_dim + rope_dim], the step's entries of the cache; up: [num_heads,
        nope_dim + value_dim, latent_dim], of each head the weights of its key's own part, then of
        its value; chosen: what queries read, instead of all tokens up to their own. Given only for
        layers with `index_topk`, and not in steps whose rows are all no longer than that (a backend
        without that feature needs no such argument) → [num_tokens, num_heads, value_dim]
        """

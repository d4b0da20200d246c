"""The contract of KV compressors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ..nn.kv_cache.quantized_cache import KVCache
    from .attention import AttentionSpec


class KVCompressor(ABC):
    """Says which cached tokens matter most, so that the others can be dropped. Subclass it.

    When a request's cache is compacted, the tokens with the highest scores stay, the same number in
    every layer and KV head, but each head keeps its own. It may happen again and again: see
    `EngineConfig.kv_compression_interval`. To test a compressor:
    `jackfield.plugins.conformance.kv_compressors`.
    """

    num_queries: ClassVar[int] = 0
    """How many of a request's last queries `scores` needs: they are kept for each slot and layer.
    0: none, and `scores` needs no such argument."""

    reads_values: ClassVar[bool] = True
    """Whether `scores` reads the values. If not, it may get [0, num_kv_heads, head_dim] instead,
    which spares copying them."""

    def __init_subclass__(cls, **options: Any) -> None:
        """A class with scores of its own does not inherit how another's are read from caches."""
        super().__init_subclass__(**options)
        if "scores" in cls.__dict__ and "cached_scores" not in cls.__dict__:
            cls.cached_scores = KVCompressor.cached_scores  # type: ignore[method-assign]

    @classmethod
    def refusal(cls, spec: AttentionSpec) -> str | None:
        """Return why it cannot serve a layer, in one clause; None (the default) if it can."""
        return None

    @abstractmethod
    def scores(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the scores of one request's tokens in one layer that sees all of them.

        Of a layer that caches latents, `spec` has one KV head: a key is a token's whole entry, its
        value the latent, which has fewer channels, and queries have absorbed the keys' projection.

        keys, values: [num_tokens, num_kv_heads, head_dim] as cached (keys normed and rotated), each
        head's in the order of their positions, which are 0, 1, 2, … until the first compaction; not
        to be changed. queries: [1 .. num_queries, num_heads, head_dim], those of the last tokens,
        normed and rotated, oldest first; given if `num_queries` is not 0 (fewer of them only after
        a prefix hit). → [num_tokens, num_kv_heads], any real type, finite or +-inf, compared as
        float32; they depend on nothing else. Among equal scores, earlier tokens stay. Runs between
        steps on the device: no copies to the host, which would wait for it.
        """

    def cached_scores(
        self,
        spec: AttentionSpec,
        caches: Sequence[KVCache],
        blocks: torch.Tensor,
        num_tokens: int,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Return what `scores` gives in several layers, read where it is cached; None (the default)
        if this is not served here: then `scores` is called for each layer, with copies. A subclass
        that overrides `scores` alone has the default.

        caches: [L] of [2 (keys, values), num_blocks, block_size, num_kv_heads, head_dim] floats, of
        which fp8 ones are multiplied by the spec's key_scale and value_scale, or quantized
        (`core.nn.kv_cache.quantized_cache`); alike in shape, strides and type. blocks: [columns]
        int32, those of the request in order; queries: [L, Q, num_heads, head_dim], contiguous
        → [L, num_kv_heads, num_tokens] float32, contiguous. Compressors that merge are not asked.
        """
        return None

    def merged_values(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        chosen: torch.Tensor,
    ) -> torch.Tensor:
        """Return the values of the tokens that stay, if they take in something of the others.

        Overridden only by compressors that merge. keys, values as for `scores`; chosen: [num_kept,
        num_kv_heads] int64, ascending per head → [num_kept, num_kv_heads, head_dim]
        """
        import torch

        heads = torch.arange(values.shape[1], device=values.device)
        return values[chosen, heads]

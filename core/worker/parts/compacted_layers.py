"""What compaction reads and moves of a layer's cache, by what the layer caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from ...nn.attention import Attention
from ...nn.kv_cache.level_cache import latent_group
from ...nn.kv_cache.quantized_cache import (
    KVCache,
    read_keys,
    read_values,
    token_parts,
    write_values,
)
from ...nn.latent.layer import LatentAttention
from ...protocols.attention import AttentionSpec
from ..selection import CacheLayer

Parts: TypeAlias = Mapping[str, torch.Tensor]
"""All that a layer keeps of each token and head, by name: views of [count, num_blocks, block_size,
num_kv_heads, width], with any strides."""


class CompactedLayer(ABC):
    """One layer's cache, as keys and values."""

    layer: CacheLayer
    query_shape: tuple[int, int]
    """[num_heads, head_dim] of queries as the layer keeps them (`query_ring`)."""
    recent: bool = False
    """Whether the layer has a window or chunks: the most recent tokens stay."""
    drafts: bool = False
    """Whether the layer is of a speculator's model: its first tokens and the most recent ones stay,
    as many as in the served model's layers, whose blocks it shares."""
    mergeable = False
    """Whether values can be replaced."""

    @property
    def group(self) -> int:
        return self.layer.group

    @property
    @abstractmethod
    def spec(self) -> AttentionSpec:
        """Return the parameters of attention to the cache: what compressors get."""

    @property
    @abstractmethod
    def parts(self) -> Parts: ...

    @property
    @abstractmethod
    def level_parts(self) -> Sequence[torch.Tensor]:
        """Return what levels round, [num_blocks, block_size, num_heads, width] each: as many
        channels of a token have a scale and a zero together.
        """

    @abstractmethod
    def keys_and_values(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as `read` does. numbers: tokens of `level_parts`, [parts, n,
        num_heads, width]
        """

    @property
    def cache(self) -> KVCache | None:
        """Return the cache for `KVCompressor.cached_scores`; None: it is not of that kind."""
        return None

    @abstractmethod
    def read(
        self, blocks: torch.Tensor, dtype: torch.dtype, *, values: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of N blocks, [N * block_size, num_kv_heads, width] each; no values
        unless asked for.
        """

    def queries(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the queries for the keys of `read`, from those that the layer has kept, [Q,
        *query_shape].
        """
        return kept

    def write_values(self, values: torch.Tensor, places: torch.Tensor) -> None:
        """Replace values. values: [N, num_kv_heads, width]; places: [N] int64"""
        raise NotImplementedError


class KeyValueLayer(CompactedLayer):
    mergeable = True

    def __init__(self, layer: Attention, max_model_len: int) -> None:
        self.layer: Attention = layer
        self.query_shape = layer.spec.num_heads, layer.spec.head_dim
        reach = layer.spec.reach
        self.recent = reach is not None and reach.most_tokens < max_model_len

    @property
    def spec(self) -> AttentionSpec:
        """Read at each compaction: scales may be set after the start."""
        return self.layer.spec

    @property
    def cache(self) -> KVCache:
        cache = self.layer.kv_cache
        assert cache is not None, "the worker binds the caches before the first step"
        return cache

    @property
    def parts(self) -> Parts:
        return token_parts(self.cache)

    @property
    def level_parts(self) -> Sequence[torch.Tensor]:
        cache = self.cache
        assert isinstance(cache, torch.Tensor), "levels are of caches in the model's type"
        return cache.unbind()

    def keys_and_values(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return numbers[0], numbers[1]

    def read(
        self, blocks: torch.Tensor, dtype: torch.dtype, *, values: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = read_keys(self.cache, blocks, dtype, self.spec.key_scale).flatten(0, 1)
        if not values:
            return keys, keys[:0]
        return keys, read_values(self.cache, blocks, dtype, self.spec.value_scale).flatten(0, 1)

    def write_values(self, values: torch.Tensor, places: torch.Tensor) -> None:
        write_values(values, self.cache, places, self.spec.value_scale)


class LatentLayer(CompactedLayer):
    """Latents as attention of one KV head: a token's key is its whole entry, its value the latent.
    Queries are kept as heads have them, and absorb `up` when they are needed.
    """

    def __init__(self, layer: LatentAttention) -> None:
        self.layer: LatentAttention = layer
        self.query_shape = layer.spec.num_heads, layer.spec.key_dim

    @property
    def spec(self) -> AttentionSpec:
        own = self.layer.spec
        return AttentionSpec(
            num_heads=own.num_heads, num_kv_heads=1, head_dim=own.cache_dim, scale=own.scale
        )

    @property
    def parts(self) -> Parts:
        own = {"latent": self._entries}
        if self.layer.index_cache is not None:
            own["index"] = self.layer.index_cache
        return {name: part[None, :, :, None] for name, part in own.items()}

    @property
    def _entries(self) -> torch.Tensor:
        entries = self.layer.latent_cache
        assert entries is not None, "the worker binds the caches before the first step"
        return entries

    def read(
        self, blocks: torch.Tensor, dtype: torch.dtype, *, values: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        entries = self._entries.index_select(0, blocks).flatten(0, 1).to(dtype)[:, None]
        return entries, entries[: len(entries) if values else 0, :, : self.layer.spec.latent_dim]

    @property
    def level_parts(self) -> Sequence[torch.Tensor]:
        spec = self.layer.spec
        width = latent_group(spec.latent_dim, spec.rope_dim)
        return (self._entries.unflatten(2, (-1, width)),)

    def keys_and_values(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        entries = numbers[0].flatten(1)[:, None]
        return entries, entries[..., : self.layer.spec.latent_dim]

    def queries(self, kept: torch.Tensor) -> torch.Tensor:
        spec, up = self.layer.spec, self.layer.absorbed
        assert up is not None, "queries were kept in a step"
        nope, rope = kept.split((spec.nope_dim, spec.rope_dim), dim=-1)
        absorbed = torch.einsum("qhn,hnl->qhl", nope, up[:, : spec.nope_dim].to(kept.dtype))
        return torch.cat((absorbed, rope), dim=-1)


def compacted_layers(
    layers: Sequence[CacheLayer], max_model_len: int, *, drafts: bool = False
) -> tuple[CompactedLayer, ...]:
    """Return the layers as compaction sees them, in order. drafts: of a speculator's model."""
    own = tuple(
        LatentLayer(layer)
        if isinstance(layer, LatentAttention)
        else KeyValueLayer(layer, max_model_len)
        for layer in layers
    )
    for layer in own:
        layer.drafts = drafts
    return own

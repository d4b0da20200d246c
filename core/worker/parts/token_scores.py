"""How much the tokens of a request's cache matter, by a KV compressor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...nn.kv_cache.quantized_cache import KVCache, token_parts
from ...protocols.kv_compressors import KVCompressor
from .compacted_layers import CompactedLayer
from .query_ring import QueryRing

FIRST_TOKENS = 4
"""First tokens of a sequence, which get most attention."""


def merges(compressor: type[KVCompressor]) -> bool:
    """Return whether it makes new values of dropped ones."""
    return compressor.merged_values is not KVCompressor.merged_values


class TokenScores:
    """Scores of a request's tokens, of several layers at once where the compressor can."""

    def __init__(
        self,
        compressor: KVCompressor,
        layers: Sequence[CompactedLayer],
        dtype: torch.dtype,
        ring: QueryRing | None,
    ) -> None:
        """layers: of all groups; dtype: of what a compressor gets; ring: last queries, if it needs
        them.
        """
        self._compressor = compressor
        self._layers = tuple(layers)
        self._dtype = dtype
        self._ring = ring
        self._merges = merges(type(compressor))

    def scores(
        self,
        numbers: Sequence[int],
        blocks: torch.Tensor,
        num_tokens: int,
        slot: int,
        length: int,
        copies: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the scores of the first `num_tokens` of these blocks, [columns] int32, in layers
        of one kind, [L, num_kv_heads, num_tokens] float32, contiguous.

        length: the sequence's computed tokens. copies: read instead of the caches, [parts,
        num_blocks, block_size, num_heads, width] each (`CompactedLayer.level_parts`).
        """
        first = self._layers[numbers[0]]
        if first.drafts:
            return _by_age(num_tokens, blocks.device).expand(
                len(numbers), first.spec.num_kv_heads, -1
            ).contiguous()  # fmt: skip
        scores = self._cached(numbers, blocks, num_tokens, slot, length, copies)
        if scores is not None:
            return scores
        places = blocks.long()
        shape = len(numbers), first.spec.num_kv_heads, num_tokens
        scores = torch.empty(shape, dtype=torch.float32, device=blocks.device)
        for place, number in enumerate(numbers):
            layer = self._layers[number]
            if copies is None:
                keys, values = layer.read(
                    places, self._dtype, values=self._compressor.reads_values
                )  # fmt: skip
            else:
                read = copies[place].index_select(1, places).flatten(1, 2)
                keys, values = layer.keys_and_values(read.to(self._dtype))
            keys, values = keys[:num_tokens], values[:num_tokens]
            more = {}
            if self._ring is not None:
                (kept,) = self._ring.queries([number], slot, length)
                more["queries"] = layer.queries(kept)
            own = self._compressor.scores(layer.spec, keys, values, **more)
            if own.shape != keys.shape[:2]:
                raise ValueError(
                    f"its scores are {list(own.shape)}, not [num_tokens, num_kv_heads], which "
                    f"is {list(keys.shape[:2])}"
                )
            scores[place] = own.T
        return scores

    def _cached(
        self,
        numbers: Sequence[int],
        blocks: torch.Tensor,
        num_tokens: int,
        slot: int,
        length: int,
        copies: Sequence[torch.Tensor] | None,
    ) -> torch.Tensor | None:
        """Return them as the compressor reads them where they are cached; None if it does not, or
        the caches differ.
        """
        own = [self._layers[number] for number in numbers]
        caches: list[KVCache] = [layer.cache for layer in own if layer.cache is not None]
        if self._merges or len(caches) < len(own):
            return None
        if copies is not None:
            caches = list(copies)
        alike = {
            tuple((p.shape, p.stride(), p.dtype) for p in token_parts(cache).values())
            for cache in caches
        }
        spec = own[0].spec
        if len(alike) > 1 or any(layer.spec != spec for layer in own):
            return None
        more: dict[str, Any] = {}
        if self._ring is not None:
            more["queries"] = self._ring.queries(numbers, slot, length)
        scores = self._compressor.cached_scores(spec, caches, blocks, num_tokens, **more)
        expected = (len(own), spec.num_kv_heads, num_tokens)
        if scores is not None and (scores.shape != expected or scores.dtype != torch.float32):
            raise ValueError(
                f"its cached scores are {list(scores.shape)} of {scores.dtype}, not [num_layers, "
                f"num_kv_heads, num_tokens] of float32, which is {list(expected)}"
            )
        return None if scores is None else scores.contiguous()


def _by_age(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return higher scores for the first tokens and the most recent ones (StreamingLLM, arXiv
    2309.17453): [num_tokens]
    """
    scores = torch.arange(num_tokens, dtype=torch.float32, device=device)
    scores[:FIRST_TOKENS] = torch.inf
    return scores

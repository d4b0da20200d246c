"""Compaction: chooses tokens to keep, and moves their keys and values."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate

import torch

from ...config import EngineConfig
from ...errors import ConfigError
from ...nn.attention import Attention
from ...nn.kv_cache.quantized_cache import (
    KVCache,
    read_keys,
    read_values,
    token_parts,
    write_values,
)
from ...nn.operations import Operations
from ...nn.step_operations.compaction import CacheMoves
from ...parts.kv_compression import Compaction
from ...protocols.kv_compressors import KVCompressor
from ...registry import Plugins
from ..slot_table import SlotTable
from .query_ring import QueryRing

logger = logging.getLogger("jackfield.worker")


class Compactor:
    """Runs a plan's compactions before its rows, without waiting for the device."""

    def __init__(
        self,
        compressor: KVCompressor,
        described: str,
        layers: Sequence[Attention],
        table: SlotTable,
        block_size: int,
        operations: Operations,
        dtype: torch.dtype,
        ring: QueryRing | None = None,
    ) -> None:
        """described: the compressor, for errors. layers: all, with caches bound. dtype: of the
        compressor's input. ring: last queries, if needed.
        """
        self._compressor = compressor
        self._described = described
        self._layers = tuple(layers)
        self._table = table
        self._block_size = block_size
        self._operations = operations
        self._dtype = dtype
        self._ring = ring
        self._merges = type(compressor).merged_values is not KVCompressor.merged_values

    def run(self, compactions: Sequence[Compaction]) -> dict[int, str]:
        """Move all requests' caches to new blocks; `table` has the old ones.

        Return failed slots with reasons: their new blocks are useless, and requests must end.
        """
        failures: dict[int, str] = {}
        moves = self._moves(compactions)
        # With merging, each layer at once: merged values of all layers take too much memory.
        step = 1 if self._merges else len(self._layers)
        for first in range(0, len(self._layers), step):
            layers = slice(first, first + step)
            chosen = moves.chosen[layers]
            merged = self._choose(layers, compactions, chosen, failures)
            self._move(layers, moves._replace(chosen=chosen))
            if self._merges:
                self._write_merged(first, moves, merged)
        return failures

    def warm_up(self) -> None:
        """Compact the null block in the scratch slot, compiling kernels."""
        count = min(2, self._block_size)
        self.run([Compaction(self._table.scratch_slot, count, count, (0,))])

    def _cache(self, number: int) -> KVCache:
        cache = self._layers[number].kv_cache
        assert cache is not None, "the worker binds the caches before the first step"
        return cache

    def _move(self, layers: slice, moves: CacheMoves) -> None:
        """Move these layers' caches unchanged, parts of a kind together."""
        kinds: dict[object, list[tuple[int, torch.Tensor]]] = {}
        for place, number in enumerate(range(len(self._layers))[layers]):
            for name, part in token_parts(self._cache(number)).items():
                kind = (name, part.shape, part.stride(), part.dtype)
                kinds.setdefault(kind, []).append((place, part))
        for members in kinds.values():
            places, parts = zip(*members, strict=True)
            chosen = moves.chosen
            if len(places) < len(chosen):
                chosen = torch.stack([chosen[place] for place in places])
            self._operations.compact_caches(parts, moves._replace(chosen=chosen))

    def _moves(self, compactions: Sequence[Compaction]) -> CacheMoves:
        """Return moves without chosen tokens: the first stands for all."""
        device = self._table.storage.device
        counts = tuple(compaction.kept for compaction in compactions)
        columns = max(len(compaction.block_ids) for compaction in compactions)
        numbers = [compaction.slot for compaction in compactions] + [*accumulate(counts, initial=0)]
        for compaction in compactions:
            numbers += [*compaction.block_ids, *[0] * (columns - len(compaction.block_ids))]
        sent = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
        count = len(compactions)
        slots, starts, targets = sent.to(device, non_blocking=True).split(
            (count, count + 1, count * columns)
        )
        heads = self._layers[0].spec.num_kv_heads
        shape = len(self._layers), sum(counts), heads
        chosen = torch.zeros(shape, dtype=torch.int32, device=device)
        table = self._table.block_table
        return CacheMoves(slots, starts, chosen, table, targets.view(count, columns), counts)

    def _choose(
        self,
        layers: slice,
        compactions: Sequence[Compaction],
        chosen: torch.Tensor,
        failures: dict[int, str],
    ) -> list[torch.Tensor | None]:
        """Choose these layers' tokens. chosen: their part of `CacheMoves.chosen`.

        Return, per compaction, merged values [kept, num_kv_heads, head_dim], or None.
        """
        merged: list[torch.Tensor | None] = []
        end = 0
        for compaction in compactions:
            begin, end = end, end + compaction.kept
            merged.append(None)
            if compaction.slot in failures:
                continue
            try:
                merged[-1] = self._choose_one(layers, compaction, chosen[:, begin:end])
            except (Exception, SystemExit) as error:
                logger.error("%s failed", self._described, exc_info=error)
                reason = f"{self._described} failed: {type(error).__name__}: {error}"
                failures[compaction.slot] = reason
        return merged

    def _choose_one(
        self, layers: slice, compaction: Compaction, chosen: torch.Tensor
    ) -> torch.Tensor | None:
        """Choose one request's tokens. Return merged values, if any, of the last layer."""
        cached = self._cached_scores(layers, compaction)
        if cached is not None:
            self._operations.best_tokens(cached, chosen)
            return None
        compressor, size, count = self._compressor, self._block_size, compaction.num_tokens
        table = self._table.block_table[compaction.slot, : -(-count // size)].long()
        length = count + int(self._table.num_dropped[compaction.slot])
        shape = (len(chosen), chosen.shape[2], count)
        all_scores = torch.empty(shape, dtype=torch.float32, device=table.device)
        for place, number in enumerate(range(len(self._layers))[layers]):
            layer = self._layers[number]
            cache, spec = self._cache(number), layer.spec
            keys = read_keys(cache, table, self._dtype, spec.key_scale).flatten(0, 1)[:count]
            values = keys[:0]
            if compressor.reads_values or self._merges:
                values = read_values(cache, table, self._dtype, spec.value_scale)
                values = values.flatten(0, 1)[:count]
            more = {}
            if self._ring is not None:
                more["queries"] = self._ring.queries(number, compaction.slot, length)
            scores = compressor.scores(layer.spec, keys, values, **more)
            if scores.shape != keys.shape[:2]:
                raise ValueError(
                    f"its scores are {list(scores.shape)}, not [num_tokens, num_kv_heads], which "
                    f"is {list(keys.shape[:2])}"
                )
            all_scores[place] = scores.T
        self._operations.best_tokens(all_scores, chosen)
        if not self._merges:
            return None
        merged = compressor.merged_values(layer.spec, keys, values, chosen[-1].long())
        if merged.shape != (compaction.kept, *values.shape[1:]):
            raise ValueError(
                f"its merged values are {list(merged.shape)}, not [num_kept, num_kv_heads, "
                f"head_dim], which is {[compaction.kept, *values.shape[1:]]}"
            )
        return merged

    def _cached_scores(self, layers: slice, compaction: Compaction) -> torch.Tensor | None:
        """Return scores read from the caches, [L, num_kv_heads, num_tokens]; None if unsupported,
        or the caches differ.
        """
        own = self._layers[layers]
        caches = [self._cache(number) for number in range(len(self._layers))[layers]]
        alike = {
            tuple((p.shape, p.stride(), p.dtype) for p in token_parts(cache).values())
            for cache in caches
        }
        spec, slot, count = own[0].spec, compaction.slot, compaction.num_tokens
        if self._merges or len(alike) > 1:
            return None
        if any(layer.spec != spec for layer in own):
            return None
        blocks = self._table.block_table[slot, : -(-count // self._block_size)]
        more = {}
        if self._ring is not None:
            length = count + int(self._table.num_dropped[slot])
            more["queries"] = self._ring.queries_of_layers(layers, slot, length)
        scores = self._compressor.cached_scores(spec, caches, blocks, count, **more)
        expected = (len(own), spec.num_kv_heads, count)
        if scores is not None and (scores.shape != expected or scores.dtype != torch.float32):
            raise ValueError(
                f"its cached scores are {list(scores.shape)} of {scores.dtype}, not [num_layers, "
                f"num_kv_heads, num_tokens] of float32, which is {list(expected)}"
            )
        return None if scores is None else scores.contiguous()

    def _write_merged(
        self, number: int, moves: CacheMoves, merged: Sequence[torch.Tensor | None]
    ) -> None:
        """Replace moved tokens' values in a layer."""
        size, cache = self._block_size, self._cache(number)
        scale = self._layers[number].spec.value_scale
        for request, new in enumerate(merged):
            if new is not None:
                order = torch.arange(len(new), device=new.device)
                places = moves.targets[request][order // size].long() * size + order % size
                write_values(new, cache, places, scale)


def load_compressor(
    plugins: Plugins, config: EngineConfig, layers: Sequence[Attention], cache_dtype: torch.dtype
) -> KVCompressor:
    """Return the configured compressor.

    Raises ConfigError if a layer's cache cannot be compacted by it.
    """
    name = config.kv_compression
    assert name is not None, "no KV compressor is configured"
    registry = plugins["kv_compressor"]
    compressor_class = registry.load(name)
    for layer in layers:
        reason = layer_refusal(layer, cache_dtype)
        if reason is None:
            with registry.calling(name, "refusal"):
                reason = compressor_class.refusal(layer.spec)
        if reason is not None:
            raise ConfigError(
                f"kv_compression: {name!r} cannot serve this model here: {reason}",
                param="kv_compression",
            )
    with registry.calling(name, "its constructor"):
        compressor: KVCompressor = compressor_class()
    return compressor


def layer_refusal(layer: Attention, cache_dtype: torch.dtype) -> str | None:
    """Return why a layer's cache cannot be compacted, or None."""
    if layer.spec.reach is not None:
        return "a layer has a sliding window or chunks, which count the tokens in the cache"
    if layer.spec.alibi_slopes is not None:
        return "a layer has ALiBi slopes, which count the tokens in the cache"
    if layer.cache_spec(cache_dtype).parts != Attention.cache_spec(layer, cache_dtype).parts:
        return "a layer caches other things than keys and values"
    return None

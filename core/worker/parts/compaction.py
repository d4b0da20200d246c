"""Compaction: chooses tokens to keep, and moves what is cached of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from ...config import EngineConfig
from ...errors import ConfigError
from ...nn.attention import Attention
from ...nn.latent.layer import LatentAttention
from ...nn.operations import Operations
from ...nn.step_operations.compaction import CacheMoves
from ...parts.kv_compression import Compaction
from ...protocols.kv_compressors import KVCompressor
from ...registry import Plugins
from ..selection import CacheLayer
from ..slot_table import SlotTable
from .compacted_layers import CompactedLayer, compacted_layers
from .query_ring import QueryRing
from .token_scores import TokenScores, merges

logger = logging.getLogger("jackfield.worker")

SLOPES = "a layer has ALiBi slopes, which count the tokens in the cache"
DISTANCES = "a layer has a bias by distance, which counts the tokens in the cache"
INDEXER = "a layer has an indexer, which finds tokens by their positions"
OTHER_PARTS = "a layer caches other things than keys and values, or latents"
REFUSALS = (SLOPES, DISTANCES, INDEXER, OTHER_PARTS)
"""Why caches of some layers are not compacted."""


@dataclass(frozen=True)
class LayerKind:
    """Layers that are compacted together: of one block table, and as many heads."""

    group: int
    num_kv_heads: int
    recent: bool
    """Whether the most recent tokens stay, instead of chosen ones."""
    drafts: bool
    numbers: tuple[int, ...]


class Compactor:
    """Runs a plan's compactions before its rows, without waiting for the device."""

    def __init__(
        self,
        compressor: KVCompressor,
        described: str,
        layers: Sequence[CompactedLayer],
        table: SlotTable,
        block_size: int,
        operations: Operations,
        dtype: torch.dtype,
        ring: QueryRing | None = None,
    ) -> None:
        """described: the compressor, for errors. layers: of all groups, whose caches are bound
        before the first call. dtype: of the compressor's input. ring: last queries, if needed.
        """
        self._compressor = compressor
        self._described = described
        self._layers = tuple(layers)
        self._table = table
        self._block_size = block_size
        self._operations = operations
        self._dtype = dtype
        self._scores = TokenScores(compressor, layers, dtype, ring)
        self._merges = merges(type(compressor))

    @cached_property
    def _kinds(self) -> tuple[LayerKind, ...]:
        """Layers with a window or chunks are left out if they have groups of their own."""
        found: dict[tuple[int, int, bool, bool], list[int]] = {}
        whole = {layer.group for layer in self._layers if not layer.recent}
        for number, layer in enumerate(self._layers):
            if layer.group in whole:
                key = layer.group, layer.spec.num_kv_heads, layer.recent, layer.drafts
                found.setdefault(key, []).append(number)
        return tuple(LayerKind(*key, tuple(numbers)) for key, numbers in found.items())

    def run(self, compactions: Sequence[Compaction]) -> dict[int, str]:
        """Move all requests' caches to new blocks; `table` has the old ones.

        Return failed slots with reasons: their new blocks are useless, and requests must end.
        """
        failures: dict[int, str] = {}
        sent = self._send(compactions)
        for kind in self._kinds:
            # With merging, each layer at once: merged values of all layers take too much memory.
            merges = self._merges and not (kind.recent or kind.drafts)
            step = 1 if merges else len(kind.numbers)
            for first in range(0, len(kind.numbers), step):
                numbers = kind.numbers[first : first + step]
                moves = self._moves(kind, len(numbers), compactions, sent)
                if kind.recent:
                    self._choose_recent(compactions, moves.chosen)
                    self._move(numbers, moves)
                    continue
                merged = self._choose(numbers, compactions, moves, failures)
                self._move(numbers, moves)
                if merges:
                    self._write_merged(numbers[0], moves, merged)
        return failures

    def warm_up(self) -> None:
        """Compact the null block in the scratch slot, compiling kernels."""
        count = min(2, self._block_size)
        groups = 1 + max((kind.group for kind in self._kinds), default=0)
        self.run([Compaction(self._table.scratch_slot, count, count, ((0,),) * groups)])

    def _move(self, numbers: Sequence[int], moves: CacheMoves) -> None:
        """Move these layers' caches unchanged, parts of a kind together."""
        kinds: dict[object, list[tuple[int, torch.Tensor]]] = {}
        for place, number in enumerate(numbers):
            for name, part in self._layers[number].parts.items():
                kind = (name, part.shape, part.stride(), part.dtype)
                kinds.setdefault(kind, []).append((place, part))
        for members in kinds.values():
            places, parts = zip(*members, strict=True)
            chosen = moves.chosen
            if len(places) < len(chosen):
                chosen = torch.stack([chosen[place] for place in places])
            self._operations.compact_caches(parts, moves._replace(chosen=chosen))

    def _send(self, compactions: Sequence[Compaction]) -> tuple[torch.Tensor, ...]:
        """Send slots, starts, and each group's targets, all int32."""
        device = self._table.storage.device
        count, groups = len(compactions), len(compactions[0].tables)
        counts = [compaction.kept for compaction in compactions]
        columns = max(len(compaction.tables[0]) for compaction in compactions)
        numbers = [compaction.slot for compaction in compactions] + [*accumulate(counts, initial=0)]
        for group in range(groups):
            for compaction in compactions:
                table = compaction.tables[group]
                numbers += [*table, *[0] * (columns - len(table))]
        sent = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
        slots, starts, targets = sent.to(device, non_blocking=True).split(
            (count, count + 1, groups * count * columns)
        )
        return slots, starts, targets.view(groups, count, columns)

    def _moves(
        self,
        kind: LayerKind,
        num_layers: int,
        compactions: Sequence[Compaction],
        sent: tuple[torch.Tensor, ...],
    ) -> CacheMoves:
        """Return moves without chosen tokens: the first stands for all."""
        slots, starts, targets = sent
        counts = tuple(compaction.kept for compaction in compactions)
        shape = num_layers, sum(counts), kind.num_kv_heads
        chosen = torch.zeros(shape, dtype=torch.int32, device=slots.device)
        table = self._table.group_table(kind.group)
        return CacheMoves(slots, starts, chosen, table, targets[kind.group], counts)

    @staticmethod
    def _choose_recent(compactions: Sequence[Compaction], chosen: torch.Tensor) -> None:
        """Choose the last tokens in all layers: those before are not seen any more."""
        end = 0
        for compaction in compactions:
            begin, end = end, end + compaction.kept
            first = compaction.num_tokens - compaction.kept
            recent = torch.arange(first, compaction.num_tokens, device=chosen.device)
            chosen[:, begin:end] = recent[:, None]

    def _choose(
        self,
        numbers: Sequence[int],
        compactions: Sequence[Compaction],
        moves: CacheMoves,
        failures: dict[int, str],
    ) -> list[torch.Tensor | None]:
        """Choose these layers' tokens, into `moves.chosen`.

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
                merged[-1] = self._choose_one(
                    numbers, compaction, moves.block_table, moves.chosen[:, begin:end]
                )
            except (Exception, SystemExit) as error:
                logger.error("%s failed", self._described, exc_info=error)
                reason = f"{self._described} failed: {type(error).__name__}: {error}"
                failures[compaction.slot] = reason
        return merged

    def _choose_one(
        self,
        numbers: Sequence[int],
        compaction: Compaction,
        block_table: torch.Tensor,
        chosen: torch.Tensor,
    ) -> torch.Tensor | None:
        """Choose one request's tokens. Return merged values, if any, of the last layer."""
        count = compaction.num_tokens
        blocks = block_table[compaction.slot, : -(-count // self._block_size)]
        length = count + int(self._table.num_dropped[compaction.slot])
        scores = self._scores.scores(numbers, blocks, count, compaction.slot, length)
        self._operations.best_tokens(scores, chosen)
        layer = self._layers[numbers[-1]]
        if not self._merges or layer.drafts:
            return None
        keys, values = layer.read(blocks.long(), self._dtype, values=True)
        keys, values = keys[:count], values[:count]
        merged = self._compressor.merged_values(layer.spec, keys, values, chosen[-1].long())
        if merged.shape != (compaction.kept, *values.shape[1:]):
            raise ValueError(
                f"its merged values are {list(merged.shape)}, not [num_kept, num_kv_heads, "
                f"head_dim], which is {[compaction.kept, *values.shape[1:]]}"
            )
        return merged

    def _write_merged(
        self, number: int, moves: CacheMoves, merged: Sequence[torch.Tensor | None]
    ) -> None:
        """Replace moved tokens' values in a layer."""
        size = self._block_size
        for request, new in enumerate(merged):
            if new is not None:
                order = torch.arange(len(new), device=new.device)
                places = moves.targets[request][order // size].long() * size + order % size
                self._layers[number].write_values(new, places)


def load_compressor(
    plugins: Plugins,
    config: EngineConfig,
    layers: Sequence[CacheLayer],
    cache_dtype: torch.dtype,
    max_model_len: int,
    drafting: Sequence[CacheLayer] = (),
) -> KVCompressor | None:
    """Return the configured compressor; None: levels keep all tokens. drafting: layers of a
    speculator's model.

    Raises ConfigError if a layer's cache cannot be compacted by it.
    """
    name, leveled = config.kv_compression, config.kv_compression_levels is not None
    reasons = [layer_refusal(layer, cache_dtype) for layer in layers]
    for each in drafting:
        if (reason := layer_refusal(each, cache_dtype)) is not None:
            reasons.append(f"in the model that drafts (speculative_config), {reason}")
    if name is None:
        _refuse("kv_compression_levels: they cannot serve", reasons)
        return None
    registry = plugins["kv_compressor"]
    compressor_class = registry.load(name)
    if leveled and merges(compressor_class):
        reasons.append("it changes values, which levels do not (kv_compression_levels)")
    for layer in compacted_layers(layers, max_model_len):
        if layer.recent:
            continue
        with registry.calling(name, "refusal"):
            reasons.append(compressor_class.refusal(layer.spec))
        if merges(compressor_class) and not layer.mergeable:
            reasons.append("it changes values, which are parts of keys in a cache of latents")
    _refuse(f"kv_compression: {name!r} cannot serve", reasons)
    with registry.calling(name, "its constructor"):
        compressor: KVCompressor = compressor_class()
    return compressor


def _refuse(what: str, reasons: Sequence[str | None]) -> None:
    """Raise ConfigError for the first reason, if any. what: option and subject"""
    for reason in reasons:
        if reason is not None:
            raise ConfigError(f"{what} this model here: {reason}", param=what.partition(":")[0])


def layer_refusal(layer: CacheLayer, cache_dtype: torch.dtype) -> str | None:
    """Return why a layer's cache cannot be compacted, or None."""
    if isinstance(layer, LatentAttention):
        if layer.index_dim is not None:
            return INDEXER
        return None
    if layer.spec.alibi_slopes is not None:
        return SLOPES
    if layer.spec.distance_bias:
        return DISTANCES
    if layer.cache_spec(cache_dtype).parts != Attention.cache_spec(layer, cache_dtype).parts:
        return OTHER_PARTS
    return None

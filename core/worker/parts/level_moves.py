"""Moves tokens of caches between levels: chooses what stays, and rounds it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from ...cache.level_options import MOST_LEVELS, WHOLE, CacheLevel, LevelFormat, level_format
from ...errors import ConfigError
from ...nn.attention import Attention
from ...nn.kv_cache.level_cache import LevelPart, read_parts, write_parts
from ...parts.kv_compression import LevelMove, LevelMoves, LevelTarget
from ...protocols.kv_compressors import KVCompressor
from ..selection import CacheLayer
from .compacted_layers import CompactedLayer
from .query_ring import QueryRing

logger = logging.getLogger("jackfield.worker")

ELEMENTS = 1 << 25
"""Most keys and values (elements) that are moved at once, which bounds the memory of it."""


class LevelMover:
    """Runs a plan's moves before its rows, without waiting for the device."""

    def __init__(
        self,
        compressor: KVCompressor | None,
        described: str,
        layers: Sequence[CompactedLayer],
        formats: Sequence[LevelFormat],
        block_size: int,
        dtype: torch.dtype,
        ring: QueryRing | None = None,
    ) -> None:
        """compressor: chooses tokens; None: all stay. described: it, for errors. layers: of all
        groups, whose caches are bound before the first call. dtype: of the compressor's input.
        """
        self._compressor = compressor
        self._described = described
        self._layers = [(n, layer) for n, layer in enumerate(layers) if not layer.recent]
        self._formats = (LevelFormat(WHOLE, block_size), *formats)
        self._dtype = dtype
        self._ring = ring

    def run(self, requests: Sequence[LevelMoves]) -> dict[int, str]:
        """Return failed slots with reasons: their caches are useless, and requests must end."""
        failures: dict[int, str] = {}
        for moves in requests:
            try:
                for move in moves.moves:
                    self._run(moves, move)
            except (Exception, SystemExit) as error:
                logger.error("%s failed", self._described, exc_info=error)
                reason = f"{self._described} failed: {type(error).__name__}: {error}"
                failures[moves.slot] = reason
        return failures

    def warm_up(self, scratch_slot: int) -> None:
        """Move the null block of the scratch slot to each level."""
        groups = 1 + max((layer.layer.group for _, layer in self._layers), default=0)
        null, size = ((0,),) * groups, self._formats[0].tokens
        kept = size if self._compressor is None else min(2, size)
        for level in range(1, len(self._formats)):
            move = LevelMove(0, size, null, (LevelTarget(level, 0, kept, null),))
            self.run([LevelMoves(scratch_slot, size, 0, (move,), null, ())])

    def _run(self, moves: LevelMoves, move: LevelMove) -> None:
        """Move the tokens of all layers, several at a time: fewer launches."""
        sent: dict[int, list[torch.Tensor]] = {}
        for group, layers in self._alike:
            keys, _ = _keys_and_values(layers[0][1])
            if group not in sent:
                lists = [move.blocks[group], *(target.blocks[group] for target in move.targets)]
                sent[group] = self._send(lists, keys.device)
            _, _, heads, width = keys.shape
            step = max(1, ELEMENTS // (2 * move.num_tokens * heads * width))
            for first in range(0, len(layers), step):
                self._move(moves, move, layers[first : first + step], *sent[group])

    @cached_property
    def _alike(self) -> list[tuple[int, list[tuple[int, CompactedLayer]]]]:
        """Group → layers whose caches are alike, with their numbers."""
        found: dict[tuple[int, torch.Size], list[tuple[int, CompactedLayer]]] = {}
        for number, layer in self._layers:
            keys, _ = _keys_and_values(layer)
            found.setdefault((layer.group, keys.shape), []).append((number, layer))
        return [(group, layers) for (group, _), layers in found.items()]

    def _move(
        self,
        moves: LevelMoves,
        move: LevelMove,
        layers: Sequence[tuple[int, CompactedLayer]],
        blocks: torch.Tensor,
        *targets: torch.Tensor,
    ) -> None:
        """Move tokens of layers that are alike: all are read before any is written.

        blocks: [N] int64, which are read; targets: likewise, those that each target writes
        """
        caches = [part for _, layer in layers for part in _keys_and_values(layer)]
        source = self._formats[move.source]
        numbers = read_parts([LevelPart.of(each, source) for each in caches], blocks, self._dtype)
        counts = [target.kept for target in move.targets]
        places: list[torch.Tensor | None] = [None]
        if counts != [move.num_tokens]:
            chosen = [
                self._choose(moves, counts, number, layer, *numbers[2 * place : 2 * place + 2])
                for place, (number, layer) in enumerate(layers)
            ]
            # [2 * len(layers), kept, num_kv_heads, 1]: keys and values go together.
            places = [
                torch.stack(each).repeat_interleave(2, dim=0)[..., None]
                for each in zip(*chosen, strict=True)
            ]
        for target, own, index in zip(move.targets, targets, places, strict=True):
            kept = numbers
            if index is not None:
                kept = numbers.gather(1, index.expand(-1, -1, -1, numbers.shape[3]))
            form = self._formats[target.level]
            write_parts([LevelPart.of(each, form) for each in caches], kept, own, target.first)

    def _choose(
        self,
        moves: LevelMoves,
        counts: Sequence[int],
        number: int,
        layer: CompactedLayer,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Return each target's tokens of a layer, [kept, num_kv_heads] int64, ascending."""
        assert self._compressor is not None, "levels that choose have a compressor"
        more: dict[str, Any] = {}
        if self._ring is not None:
            (kept,) = self._ring.queries([number], moves.slot, moves.num_computed)
            more["queries"] = layer.queries(kept)
        scores = self._compressor.scores(layer.spec, keys, values, **more)
        if scores.shape != keys.shape[:2]:
            raise ValueError(
                f"its scores are {list(scores.shape)}, not [num_tokens, num_kv_heads], which "
                f"is {list(keys.shape[:2])}"
            )
        # Among equal scores, earlier tokens come first.
        order = scores.float().argsort(dim=0, descending=True, stable=True)
        return [part.sort(dim=0).values for part in order[: sum(counts)].split(counts)]

    @staticmethod
    def _send(parts: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
        """Return lists of numbers on the device, in one copy."""
        numbers = [number for part in parts for number in part]
        sent = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
        return list(sent.to(device, non_blocking=True).split([len(part) for part in parts]))


def _keys_and_values(layer: CompactedLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_blocks, block_size, num_kv_heads, head_dim] each"""
    cache = layer.cache
    assert isinstance(cache, torch.Tensor), "levels are of caches in the model's type"
    return cache[0], cache[1]


def level_formats(
    layers: Sequence[CacheLayer],
    levels: Sequence[CacheLevel],
    block_size: int,
    dtype: torch.dtype,
    max_model_len: int,
) -> tuple[LevelFormat, ...]:
    """Return how blocks of each level are filled, alike in all layers. Raises ConfigError if a
    layer cannot have levels.
    """

    def refuse(reason: str) -> ConfigError:
        return ConfigError(
            f"kv_compression_levels: they cannot serve this model here: {reason}",
            param="kv_compression_levels",
        )

    heads: set[int] = set()
    for layer in layers:
        if not isinstance(layer, Attention):
            raise refuse("latents are cached in the model's type alone")
        if isinstance(layer.cache_format, torch.dtype) and layer.cache_format != dtype:
            raise refuse(f"a layer caches in {layer.cache_format}, not in {dtype}")
        reach = layer.spec.reach
        if reach is None or reach.most_tokens >= max_model_len:
            heads.add(layer.spec.head_dim)
        elif reach.alignment > 1:
            raise refuse(
                f"a layer sees chunks of {reach.chunk_size} tokens, which begin at multiples of it"
            )
        elif reach.most_tokens > levels[0].age:
            raise refuse(
                f"a layer sees a window of {reach.most_tokens} tokens, which stay as they are "
                f"computed, and the first level begins at age {levels[0].age}; begin it at "
                f"{reach.most_tokens} or later"
            )
    if odd := [head for head in heads if head % 8]:
        raise refuse(f"a head has {odd[0]} channels, which is not a multiple of 8")
    formats = []
    for level in levels:
        each = [level_format(level.bits, block_size, head, dtype.itemsize) for head in heads]
        formats.append(min(each, default=LevelFormat(level.bits, block_size)))
    assert len(formats) <= MOST_LEVELS
    return tuple(formats)

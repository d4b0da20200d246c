"""Moves tokens of caches between levels: chooses what stays, and rounds it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ...cache.level_options import MOST_LEVELS, WHOLE, CacheLevel, LevelFormat, level_format
from ...errors import ConfigError
from ...nn.attention import Attention
from ...nn.kv_cache.level_cache import LevelPart
from ...parts.kv_compression import LevelMove, LevelMoves, LevelTarget
from ...protocols.kv_compressors import KVCompressor
from ..selection import CacheLayer
from .compacted_layers import CompactedLayer
from .query_ring import QueryRing

logger = logging.getLogger("jackfield.worker")


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
                    for number, layer in self._layers:
                        self._run(moves, move, number, layer)
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

    def _run(self, moves: LevelMoves, move: LevelMove, number: int, layer: CompactedLayer) -> None:
        """Move one layer's tokens: all are read before any is written."""
        cache = layer.cache
        assert isinstance(cache, torch.Tensor), "levels are of caches in the model's type"
        sent = [move.blocks[layer.group], *(target.blocks[layer.group] for target in move.targets)]
        blocks, *targets = self._send(sent, cache.device)
        source = self._formats[move.source]
        keys, values = (
            LevelPart.of(part, source).read(blocks, self._dtype) for part in cache.unbind()
        )
        chosen = self._choose(moves, move, number, layer, keys, values)
        for target, own, which in zip(move.targets, targets, chosen, strict=True):
            for part, numbers in zip(cache.unbind(), (keys, values), strict=True):
                kept = numbers
                if which is not None:
                    places = which.long()[..., None].expand(-1, -1, numbers.shape[2])
                    kept = numbers.gather(0, places)
                form = self._formats[target.level]
                LevelPart.of(part, form).write(kept, own, target.first)

    def _choose(
        self,
        moves: LevelMoves,
        move: LevelMove,
        number: int,
        layer: CompactedLayer,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> list[torch.Tensor | None]:
        """Return each target's tokens, [kept, num_kv_heads], ascending; None: all."""
        counts = [target.kept for target in move.targets]
        if counts == [move.num_tokens]:
            return [None]
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

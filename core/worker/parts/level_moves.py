"""Moves tokens of caches between levels: chooses what stays, and rounds it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch

from ...cache.level_options import MOST_LEVELS, WHOLE, CacheLevel, LevelFormat, level_format
from ...errors import ConfigError
from ...nn.kv_cache.level_cache import latent_group
from ...nn.latent.layer import LatentAttention
from ...nn.operations import Operations
from ...nn.step_operations.compaction import LevelCopy
from ...parallel.ranks import Ranks
from ...parts.kv_compression import LevelMove, LevelMoves, LevelTarget
from ...protocols.kv_compressors import KVCompressor
from ..selection import CacheLayer
from .compacted_layers import CompactedLayer
from .query_ring import QueryRing
from .token_scores import TokenScores

logger = logging.getLogger("jackfield.worker")

ELEMENTS = 1 << 25
"""Most keys and values (elements) that are copied at once, which bounds the memory of it."""
MAX_TOKENS = 1 << 20
"""Tokens of a block, where no layer has levels."""


class LevelKind(NamedTuple):
    """Layers whose tokens move together: of one block table, and alike."""

    group: int
    numbers: tuple[int, ...]


class LevelMover:
    """Runs a plan's moves before its rows, without waiting for the device."""

    def __init__(
        self,
        compressor: KVCompressor | None,
        described: str,
        layers: Sequence[CompactedLayer],
        formats: Sequence[LevelFormat],
        block_size: int,
        operations: Operations,
        dtype: torch.dtype,
        ring: QueryRing | None = None,
    ) -> None:
        """compressor: chooses tokens; None: all stay. described: it, for errors. layers: of all
        groups, whose caches are bound before the first call. dtype: of the compressor's input.
        """
        self._scores = None
        if compressor is not None:
            self._scores = TokenScores(compressor, layers, dtype, ring)
        self._described = described
        self._layers = tuple(layers)
        self._formats = (LevelFormat(WHOLE, block_size), *formats)
        self._operations = operations

    @cached_property
    def _kinds(self) -> tuple[LevelKind, ...]:
        """Layers with a window or chunks are left out: what they see stays as it is."""
        kinds: dict[tuple[int, torch.Size, bool], list[int]] = {}
        for number, layer in enumerate(self._layers):
            if not layer.recent:
                key = layer.group, layer.level_parts[0].shape, layer.drafts
                kinds.setdefault(key, []).append(number)
        return tuple(LevelKind(group, tuple(own)) for (group, *_), own in kinds.items())

    def run(self, requests: Sequence[LevelMoves]) -> dict[int, str]:
        """Return failed slots with reasons: their caches are useless, and requests must end."""
        failures: dict[int, str] = {}
        for kind in self._kinds:
            copies: list[LevelCopy] = []
            for moves in requests:
                if moves.slot in failures:
                    continue
                try:
                    copies += self._copies(kind, moves)
                except (Exception, SystemExit) as error:
                    logger.error("%s failed", self._described, exc_info=error)
                    reason = f"{self._described} failed: {type(error).__name__}: {error}"
                    failures[moves.slot] = reason
            if copies:
                self._copy(kind, copies)
        return failures

    def warm_up(self, scratch_slot: int) -> None:
        """Move the null block of the scratch slot to each level."""
        groups = 1 + max((layer.group for layer in self._layers), default=0)
        null, size = ((0,),) * groups, self._formats[0].tokens
        kept = size if self._scores is None else min(2, size)
        for level in range(1, len(self._formats)):
            move = LevelMove(0, size, null, (LevelTarget(level, 0, kept, null),))
            self.run([LevelMoves(scratch_slot, size, 0, (move,), null, ())])

    def _copies(self, kind: LevelKind, moves: LevelMoves) -> list[LevelCopy]:
        """Return what a request's moves copy in these layers. No move reads what an earlier one has
        appended: all tokens can be chosen before the first is written.
        """
        copies = []
        for move in moves.moves:
            source, blocks = self._formats[move.source], move.blocks[kind.group]
            chosen: Sequence[torch.Tensor | None] = [None]
            if [target.kept for target in move.targets] != [move.num_tokens]:
                chosen = self._choose(kind, moves, move)
            copies += [
                LevelCopy(
                    source, blocks, self._formats[target.level], target.blocks[kind.group],
                    target.first, target.kept, index,
                )
                for target, index in zip(move.targets, chosen, strict=True)
            ]  # fmt: skip
        return copies

    def _copy(self, kind: LevelKind, copies: Sequence[LevelCopy]) -> None:
        """Copy all at once; by other memory, several layers at a time, if blocks that are written
        are read, too.
        """
        parts = [self._layers[number].level_parts for number in kind.numbers]
        read = {block for copy in copies for block in copy.sources}
        if read.isdisjoint(chain.from_iterable(copy.targets for copy in copies)):
            own = [*chain.from_iterable(parts)]
            self._operations.move_levels(own, own, copies)
            return
        whole, ends = self._formats[0], [0]
        for copy in copies:
            ends.append(ends[-1] + -(-copy.num_tokens // whole.tokens))
        aside = [range(begin, end) for begin, end in pairwise(ends)]
        for first, end in self._spans(kind, sum(copy.num_tokens for copy in copies)):
            own = [*chain.from_iterable(parts[first:end])]
            there = [each.new_empty((ends[-1], *each.shape[1:])) for each in own]
            reads, writes = [], []
            for copy, blocks in zip(copies, aside, strict=True):
                index = None if copy.chosen is None else copy.chosen[first:end]
                reads.append(copy._replace(target=whole, targets=blocks, first=0, chosen=index))
                writes.append(copy._replace(source=whole, sources=blocks, chosen=None))
            self._operations.move_levels(own, there, reads)
            self._operations.move_levels(there, own, writes)

    def _spans(self, kind: LevelKind, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield layers, first and end: as many at a time as have `ELEMENTS` of so many tokens."""
        parts, count = self._layers[kind.numbers[0]].level_parts, len(kind.numbers)
        step = max(1, ELEMENTS // (len(parts) * num_tokens * parts[0][0, 0].numel()))
        return ((first, min(first + step, count)) for first in range(0, count, step))

    def _choose(self, kind: LevelKind, moves: LevelMoves, move: LevelMove) -> list[torch.Tensor]:
        """Return each target's tokens, [layers, kept, num_kv_heads] int32, ascending: those with
        the highest scores go to the first one.
        """
        counts, layer = [target.kept for target in move.targets], self._layers[kind.numbers[0]]
        device, heads = layer.level_parts[0].device, layer.spec.num_kv_heads
        chosen = [
            torch.empty((len(kind.numbers), count, heads), dtype=torch.int32, device=device)
            for count in accumulate(counts)
        ]
        for first, end in self._spans(kind, move.num_tokens):
            scores = self._score(kind, kind.numbers[first:end], moves, move)
            for index in chosen:
                self._operations.best_tokens(scores, index[first:end])
        return [chosen[0], *(_without(*each) for each in pairwise(chosen))]

    def _score(
        self, kind: LevelKind, numbers: Sequence[int], moves: LevelMoves, move: LevelMove
    ) -> torch.Tensor:
        """Return scores as `TokenScores` does; tokens in fewer bits are converted for it first."""
        assert self._scores is not None, "levels that choose have a compressor"
        source, count = self._formats[move.source], move.num_tokens
        blocks: Sequence[int] = move.blocks[kind.group]
        copies = None
        if source.bits != WHOLE:
            whole = self._formats[0]
            read, blocks = blocks, range(-(-count // whole.tokens))
            parts = [self._layers[number].level_parts for number in numbers]
            copies = [
                own[0].new_empty((len(own), len(blocks), *own[0].shape[1:])) for own in parts
            ]  # fmt: skip
            copy = LevelCopy(source, read, whole, blocks, 0, count)
            self._operations.move_levels(
                [*chain.from_iterable(parts)], [*chain.from_iterable(copies)], [copy]
            )
        device = self._layers[numbers[0]].level_parts[0].device
        sent = torch.tensor(blocks, dtype=torch.int32, pin_memory=device.type == "cuda")
        sent = sent.to(device, non_blocking=True)
        return self._scores.scores(numbers, sent, count, moves.slot, moves.num_computed, copies)


def _without(fewer: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Return the tokens of `more` that are not in `fewer`, which has none besides: [layers, kept,
    num_kv_heads] each, ascending.
    """
    end = torch.iinfo(more.dtype).max
    # Where each of the fewer is among the more: both ascend.
    places = torch.searchsorted(
        more.transpose(1, 2).contiguous(), fewer.transpose(1, 2).contiguous()
    )
    left = more.scatter(1, places.transpose(1, 2), end)
    count = more.shape[1] - fewer.shape[1]
    return left.sort(dim=1).values[:, :count].contiguous()


def level_formats(
    layers: Sequence[CacheLayer],
    levels: Sequence[CacheLevel],
    block_size: int,
    dtype: torch.dtype,
    max_model_len: int,
    ranks: Ranks,
    device: torch.device,
) -> tuple[LevelFormat, ...]:
    """Return how blocks of each level are filled, alike in all layers of all stages. Raises
    ConfigError if a layer cannot have levels.
    """

    def refuse(reason: str) -> ConfigError:
        return ConfigError(
            f"kv_compression_levels: they cannot serve this model here: {reason}",
            param="kv_compression_levels",
        )

    widths: set[int] = set()
    for layer in layers:
        if isinstance(layer, LatentAttention):
            widths.add(latent_group(layer.spec.latent_dim, layer.spec.rope_dim))
            continue
        if isinstance(layer.cache_format, torch.dtype) and layer.cache_format != dtype:
            raise refuse(f"a layer caches in {layer.cache_format}, not in {dtype}")
        reach = layer.spec.reach
        if reach is None or reach.most_tokens >= max_model_len:
            widths.add(layer.spec.head_dim)
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
    if odd := [width for width in widths if width % 8]:
        raise refuse(
            f"a head, or a group of a latent's channels, has {odd[0]}, which is not a multiple of 8"
        )
    formats = []
    for level in levels:
        sizes = [level_format(level.bits, block_size, own, dtype.itemsize).tokens for own in widths]
        # A stage without such layers takes what the others have.
        least = ranks.minimum_of_stages(min(sizes, default=MAX_TOKENS), device)
        formats.append(LevelFormat(level.bits, least))
    assert len(formats) <= MOST_LEVELS
    return tuple(formats)

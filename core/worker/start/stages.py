"""What pipeline stages exchange at the start."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from ...cache.groups import CacheGroup, TokenCache
from ...parallel.join import exchange
from ...parallel.ranks import Pipeline


class StageFacts(msgspec.Struct, frozen=True):
    specs: tuple[TokenCache, ...]
    num_snapshots: int | None
    """Room for snapshots of states; None without states."""
    cache_groups: bool
    """Whether its backend serves several groups of layers."""


class AllStages:
    """All stages' facts, in order."""

    def __init__(self, pipeline: Pipeline, own: StageFacts, device: torch.device) -> None:
        self._stages = [own]
        self._stage = pipeline.stage
        if pipeline.world is not None:
            facts = exchange(pipeline.world, msgspec.to_builtins(own), device)
            by_stage = facts[:: pipeline.tensor_size][::-1]
            self._stages = [msgspec.convert(each, StageFacts) for each in by_stage]

    @property
    def specs(self) -> list[TokenCache]:
        """All layers' caches, in order."""
        return [spec for stage in self._stages for spec in stage.specs]

    @property
    def num_snapshots(self) -> int | None:
        """Common room for snapshots; None without states."""
        counts = [s.num_snapshots for s in self._stages if s.num_snapshots is not None]
        return min(counts, default=None)

    @property
    def cache_groups(self) -> bool:
        """Whether several groups are possible."""
        return all(stage.cache_groups for stage in self._stages)

    def own(self, groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
        """Return the groups with this stage's layers only, counted from its first."""
        start = sum(len(stage.specs) for stage in self._stages[: self._stage])
        end = start + len(self._stages[self._stage].specs)
        return tuple(
            CacheGroup(
                tuple(n - start for n in group.layers if start <= n < end),
                group.reach,
                group.inner_reaches,
            )
            for group in groups
        )

"""The KV cache's share of device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ...config import EngineConfig
from ...parallel.ranks import Ranks
from ..kv_cache.memory import CacheDemand, cache_space
from ..mapped.regions import MappedMemory
from .warmup import Warmup

T = TypeVar("T")


class CacheRoom:
    """Created before a model is loaded, so that other memory is known."""

    def __init__(
        self,
        config: EngineConfig,
        ranks: Ranks,
        device: torch.device,
        mapped: MappedMemory | None = None,
    ) -> None:
        """mapped: memory that torch's allocator does not count."""
        assert config.max_num_batched_tokens is not None
        self._config, self._ranks, self._device = config, ranks, device
        self._mapped = mapped
        self._max_num_batched_tokens: int = config.max_num_batched_tokens
        self._held_before = 0
        """Bytes allocated before."""
        if device.type == "cuda":
            self._held_before = torch.cuda.memory_allocated(device)

    def length_of_tables(self, demand: CacheDemand, state_bytes: int) -> int:
        """Return the positions of tables: max_model_len, or the longest sequence that may fit in
        memory: tables for millions of tokens would take gigabytes before memory is measured, after
        which the start fails with a clear error, or `max_model_len` is automatic.
        """
        if self._config.num_gpu_blocks_override is not None:
            return demand.max_model_len
        if (stated := self._given(state_bytes)) is not None:
            most = stated
        else:
            total = torch.cuda.mem_get_info(self._device)[1]
            most = int(total * self._config.gpu_memory_utilization) - self._allocated
        longest = demand.longest(self._ranks.minimum(most, self._device))
        longest = max(longest, min(self._max_num_batched_tokens, demand.max_model_len))
        return self._ranks.minimum_of_stages(longest, self._device)

    def available(self, warmup: Warmup, state_bytes: int, later_bytes: int) -> int:
        """Return each rank's bytes for blocks, after a step at full budget. state_bytes: already
        allocated; later_bytes: as `PartNeeds` has them.
        """
        room = self._available(warmup, state_bytes, later_bytes)
        return self._ranks.minimum(room, self._device)

    @property
    def _allocated(self) -> int:
        """This engine's allocated bytes."""
        return torch.cuda.memory_allocated(self._device) - self._held_before + self._beside

    @property
    def _beside(self) -> int:
        """This engine's bytes that torch's allocator does not count."""
        return 0 if self._mapped is None else self._mapped.nbytes

    def _given(self, state_bytes: int) -> int | None:
        """Return the bytes that the configuration states, or None."""
        space = cache_space(self._config, self._device)
        return None if space is None else max(0, space - state_bytes)

    def _available(self, warmup: Warmup, state_bytes: int, later_bytes: int) -> int:
        if (stated := self._given(state_bytes + later_bytes)) is not None:
            return stated
        if self._config.num_gpu_blocks_override is not None:
            return 0
        resting = torch.cuda.memory_allocated(self._device)
        # Parts do their work before a step, which takes the same memory again.
        of_parts, kept = self._peak_of(warmup.run_largest_parts)
        of_step, _ = self._peak_of(warmup.run_largest)
        peak = max(of_parts, of_step) + kept - self._held_before + self._beside
        if not self._config.enforce_eager:
            # Graphs share memory of their own, as much as the largest needs.
            of_recorded, _ = self._peak_of(warmup.run_largest_recorded_parts)
            peak += max(of_step, of_recorded) - resting
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        budget = int(total * self._config.gpu_memory_utilization) - peak
        return max(0, min(budget, free - (peak - self._allocated)))

    def _peak_of(self, work: Callable[[], T]) -> tuple[int, T]:
        """Return the most bytes that are allocated during work, and what it returns."""
        torch.cuda.reset_peak_memory_stats(self._device)
        result = work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device), result

"""How much of a device's memory the KV cache may take."""

from __future__ import annotations

import torch

from ...config import EngineConfig
from ...parallel.ranks import Ranks
from ..kv_cache.memory import GIB, CacheDemand
from .warmup import Warmup


class CacheRoom:
    """Made before a model is loaded: what is allocated by then is not this engine's."""

    def __init__(self, config: EngineConfig, ranks: Ranks, device: torch.device) -> None:
        """`config` is resolved."""
        assert config.max_num_batched_tokens is not None
        self._config, self._ranks, self._device = config, ranks, device
        self._max_num_batched_tokens: int = config.max_num_batched_tokens
        self._held_before = 0
        """Bytes that were allocated on the device."""
        if device.type == "cuda":
            self._held_before = torch.cuda.memory_allocated(device)

    def length_of_tables(self, demand: CacheDemand, state_bytes: int) -> int:
        """Return the number of positions for which tables are made: max_model_len.

        If a sequence of that length cannot fit in the device's memory, whatever a step takes, it is
        the longest that may: tables for a context of millions of tokens would take gigabytes before
        memory is measured. Then the start fails and the error says what fits, or `max_model_len` is
        auto.
        """
        if self._config.num_gpu_blocks_override is not None:
            return demand.max_model_len
        if self._device.type == "cpu":
            most = self._available_on_cpu(state_bytes)
        else:
            total = torch.cuda.mem_get_info(self._device)[1]
            most = int(total * self._config.gpu_memory_utilization) - self._allocated
        longest = demand.longest(self._ranks.minimum(most, self._device))
        longest = max(longest, min(self._max_num_batched_tokens, demand.max_model_len))
        return self._ranks.minimum_of_stages(longest, self._device)

    def available(self, warmup: Warmup, state_bytes: int) -> int:
        """Return the bytes that each rank has left for blocks, after one step at full budget has
        been measured. state_bytes: of states, which are allocated already."""
        return self._ranks.minimum(self._available(warmup, state_bytes), self._device)

    @property
    def _allocated(self) -> int:
        """Bytes that this engine has allocated."""
        return torch.cuda.memory_allocated(self._device) - self._held_before

    def _available_on_cpu(self, state_bytes: int) -> int:
        return max(0, int(self._config.cpu_kvcache_space * GIB) - state_bytes)

    def _available(self, warmup: Warmup, state_bytes: int) -> int:
        if self._device.type == "cpu":
            return self._available_on_cpu(state_bytes)
        if self._config.num_gpu_blocks_override is not None:
            return 0
        resting = torch.cuda.memory_allocated(self._device)
        warmup.run_largest()
        torch.cuda.synchronize(self._device)
        largest = torch.cuda.max_memory_allocated(self._device)
        peak = largest - self._held_before
        if not self._config.enforce_eager:
            # Graphs need as much memory of their own as the largest step.
            peak += largest - resting
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        budget = int(total * self._config.gpu_memory_utilization) - peak
        return max(0, min(budget, free - (peak - self._allocated)))

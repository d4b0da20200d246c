"""What a KV cache consists of, before the number of its blocks is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...cache.groups import CacheGroup
from ...nn.attention import Attention
from ..kv_cache.allocation import bind_cache, form_cache_groups
from ..kv_cache.memory import CacheDemand, bytes_per_block, bytes_per_token, zeros
from ..parts.part import PartNeeds, PartStart, StartContext
from ..parts.states import StatesStart
from ..selection import CacheLayer, cache_layers
from .attention import ChosenBackend
from .stages import AllStages, StageFacts


class CachePlan:
    """The layers that share blocks, and the bytes of a block."""

    def __init__(
        self, start: StartContext, parts: Sequence[PartStart], chosen: ChosenBackend
    ) -> None:
        config, kv_dtype = start.config, start.kv_dtype
        assert config.max_num_batched_tokens is not None
        self._start, self._parts = start, parts
        needs = [part.needs for part in parts]
        own_blocks = self._layers_of_parts(needs)
        self._layers = [*start.layers, *own_blocks]
        specs = [layer.cache_spec(kv_dtype) for layer in self._layers]
        states = next((part.states for part in parts if isinstance(part, StatesStart)), None)
        stage_facts = StageFacts(
            specs=tuple(specs),
            num_snapshots=None if states is None else states.num_snapshots,
            cache_groups=chosen.backend_class.cache_groups,
        )
        stages = AllStages(start.ranks.pipeline, stage_facts, start.device)
        self.num_snapshots = stages.num_snapshots
        refusal = None if stages.cache_groups else f"attention backend {chosen.name} reads them"
        max_model_len = start.model_config.max_model_len
        self.all_groups = form_cache_groups(stages.specs, refusal, config, max_model_len)
        """Of all stages."""
        self.groups = stages.own(self.all_groups)
        """Of this stage."""
        self._own_blocks = {layer: count * len(self.groups) for layer, count in own_blocks.items()}
        self.held_bytes = sum(need.nbytes for need in needs) + sum(
            count * config.block_size * bytes_per_token(layer.cache_spec(kv_dtype))
            for layer, count in self._own_blocks.items()
        )
        """What parts hold besides requests' blocks."""
        self.later_bytes = sum(need.later_bytes for need in needs)
        """As `PartNeeds` has them."""
        self.demand = CacheDemand(
            groups=(*self.all_groups, *[CacheGroup()] * sum(need.extra_tables for need in needs)),
            block_bytes=bytes_per_block(specs, self.groups, config.block_size),
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_chunk=config.max_num_batched_tokens,
        )

    def _layers_of_parts(self, needs: Sequence[PartNeeds]) -> dict[CacheLayer, int]:
        """Return the layers of parts' models that join the cache, with their own blocks in each
        group."""
        own_blocks = {}
        for need in needs:
            for layer in () if need.model is None else cache_layers(need.model):
                if isinstance(layer, Attention):
                    layer.cache_format = self._start.model_config.dtype
                own_blocks[layer] = need.own_blocks * (self._start.config.max_num_seqs + 1)
        return own_blocks

    def nbytes(self, num_blocks: int) -> int:
        """Return the bytes of the cache and of what parts hold."""
        return num_blocks * self.demand.block_bytes + self.held_bytes + self.later_bytes

    def allocate(self, num_blocks: int) -> Sequence[Mapping[str, torch.Tensor]]:
        """Allocate the cache, and bind it to layers and parts. Return it: [layers that share no
        memory], parts by name."""
        start = self._start
        caches = bind_cache(
            self._layers,
            self.groups,
            num_blocks,
            start.config.block_size,
            start.kv_dtype,
            start.device,
            self._own_blocks,
            zeros if start.mapped is None else start.mapped.zeros,
        )
        for part in self._parts:
            part.bind(caches)
        return caches

"""States of sequences: a row per slot, in common tensors of all layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import nn

from ...cache.groups import CachePart
from ...config import EngineConfig
from ...errors import ConfigError, OutOfMemory
from ...nn.state.layer import StateLayer
from ...parallel.ranks import ONE_RANK, Ranks
from ...parts.states import NAME, StatePlan
from ...step import PartPlan, StepPlan
from ..kv_cache.memory import GIB, cache_space, zeros
from ..launched_step import LaunchedStep
from .part import PartNeeds, PartSite, PartStart, StartContext, WorkerPart

SNAPSHOT_SHARE = 1 / 10
"""Snapshots' share of the memory left by slots' states."""
MOST_SNAPSHOTS = 256
CONVOLUTION = "conv"
"""Part of a state with a convolution's inputs."""


class States(WorkerPart):
    """All layers' states; rows: per slot, one for padding, then snapshots."""

    name = NAME

    def __init__(
        self,
        layers: Mapping[StateLayer, Sequence[CachePart]],
        num_slots: int,
        device: torch.device,
        available: int,
        *,
        shares: bool,
    ) -> None:
        """Allocate and bind the states. Raises OutOfMemory beyond `available` bytes. layers: their
        stored parts; shares: with snapshots.
        """
        places: dict[CachePart, list[StateLayer]] = {}
        for layer, parts in layers.items():
            for part in parts:
                places.setdefault(part, []).append(layer)
        self.bytes_per_slot = sum(
            math.prod(part.shape) * getattr(torch, part.dtype).itemsize * len(sharers)
            for part, sharers in places.items()
        )
        """Bytes of a sequence's states."""
        self.nbytes = self.bytes_per_slot * (num_slots + 1)
        if self.nbytes > available:
            raise OutOfMemory(
                f"the states of {num_slots} requests (max_num_seqs) need {self.nbytes / GIB:.2f} "
                f"GiB, and {available / GIB:.2f} GiB are free: lower max_num_seqs (at most "
                f"{max(0, available // self.bytes_per_slot - 1)} fit)",
                param="max_num_seqs",
            )
        self.num_snapshots = 0
        if shares:
            room = int((available - self.nbytes) * SNAPSHOT_SHARE) // self.bytes_per_slot
            self.num_snapshots = min(room, MOST_SNAPSHOTS)
        self._first_snapshot = num_slots + 1
        num_states = num_slots + 1 + self.num_snapshots
        self.nbytes = self.bytes_per_slot * num_states
        self.storage: dict[CachePart, torch.Tensor] = {}
        """Part → [layers with it, num_states, *shape]."""
        bound: dict[StateLayer, dict[str, torch.Tensor]] = {layer: {} for layer in layers}
        for part, sharers in places.items():
            shape = (len(sharers), num_states, *part.shape)
            tensor = zeros(shape, getattr(torch, part.dtype), device)
            self.storage[part] = tensor
            for number, layer in enumerate(sharers):
                bound[layer][part.name] = tensor[number]
        for layer, states in bound.items():
            layer.bind(states)

    def before(self, part: PartPlan | None, plan: StepPlan) -> None:
        if isinstance(part, StatePlan):
            for copy in part.loads:
                self._copy(self._first_snapshot + copy.snapshot, copy.slot)

    def after(self, part: PartPlan | None, step: LaunchedStep) -> None:
        if isinstance(part, StatePlan):
            for copy in part.saves:
                self._copy(copy.slot, self._first_snapshot + copy.snapshot)

    def _copy(self, source: int, target: int) -> None:
        """Copy a row's states of all layers, row by row, as a row may exceed 100 MB."""
        for tensor in self.storage.values():
            tensor[:, target].copy_(tensor[:, source])


def stored_parts(layer: StateLayer, config: EngineConfig) -> tuple[CachePart, ...]:
    """Return a layer's parts, in the configured types."""
    conv, ssm = config.mamba_cache_dtype, config.mamba_ssm_cache_dtype
    parts = []
    for part in layer.cache.parts:
        wish = conv if part.name == CONVOLUTION or ssm == "auto" else ssm
        parts.append(part if wish == "auto" else msgspec.structs.replace(part, dtype=wish))
    return tuple(parts)


class StatesStart(PartStart):
    option = "model"

    def __init__(self, start: StartContext) -> None:
        config, device = start.config, start.device
        self.states = make_states(start.model, config, device, start.ranks)
        self.needs = PartNeeds(nbytes=self.states.nbytes)

    def make(self, site: PartSite) -> States:
        return self.states


def make_states(
    model: nn.Module, config: EngineConfig, device: torch.device, ranks: Ranks = ONE_RANK
) -> States:
    """Return a model's states. Raises OutOfMemory.

    A stage's ranks have equally many snapshots, by the least memory.
    """
    space = cache_space(config, device)
    if space is None:
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * config.gpu_memory_utilization) - torch.cuda.memory_allocated(device)
        space = max(0, min(free, budget))
    available = ranks.minimum(space, device)
    stored = {layer: stored_parts(layer, config) for layer in state_layers(model)}
    return States(
        stored, config.max_num_seqs, device, available, shares=config.enable_prefix_caching
    )


def state_layers(model: nn.Module) -> list[StateLayer]:
    return [module for module in model.modules() if isinstance(module, StateLayer)]


def check_state_options(config: EngineConfig) -> None:
    """Raises ConfigError for state options of a model without states."""
    wishes = {
        "mamba_cache_dtype": config.mamba_cache_dtype,
        "mamba_ssm_cache_dtype": config.mamba_ssm_cache_dtype,
    }
    for name, wish in wishes.items():
        if wish != "auto":
            raise ConfigError(
                f"{name}: this model keeps no states of sequences (kv_cache_dtype is the type "
                "of keys and values)",
                param=name,
            )

"""States of sequences: a row per slot, in common tensors of all layers; with drafts, a second row
per slot, for the forward pass (`core/nn/state/drafts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import nn

from ...cache.groups import CachePart
from ...config import EngineConfig
from ...errors import ConfigError, OutOfMemory
from ...nn.state.drafts import DraftedStates, NotingOperations
from ...nn.state.layer import StateLayer
from ...parallel.ranks import ONE_RANK, Ranks
from ...parts import speculation
from ...parts.states import NAME, StatePlan
from ...step import NOTHING_IN_PROCESS, InProcess, PartPlan, SlotStart, StepPlan
from ..kv_cache.memory import GIB, Zeros, cache_space, zeros
from ..launched_step import LaunchedStep
from ..mapped.regions import MappedMemory
from ..packing import PackedUpload
from .part import PartNeeds, PartSite, PartStart, StartContext, WorkerPart

SNAPSHOT_SHARE = 1 / 10
"""Snapshots' share of the memory left by slots' states."""
MOST_SNAPSHOTS = 256
MOST_UNVERIFIED = 64
"""Steps whose drafts are not verified; more than are in flight."""
CONVOLUTION = "conv"
"""Part of a state with a convolution's inputs."""


class States(WorkerPart):
    """All layers' states; rows: per slot, one for padding, with drafts again as many, then
    snapshots.
    """

    name = NAME

    def __init__(
        self,
        layers: Mapping[StateLayer, Sequence[CachePart]],
        num_slots: int,
        device: torch.device,
        available: int,
        *,
        shares: bool,
        num_drafts: int = 0,
        on_device: bool = False,
        make: Zeros = zeros,
    ) -> None:
        """Allocate and bind the states. Raises OutOfMemory beyond `available` bytes. layers: their
        stored parts; shares: with snapshots; num_drafts: most per row; on_device: operations on
        states read rows on the device alone; make: makes tensors.
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
        self._num_rows = num_slots + 1
        num_own = self._num_rows * (1 + (num_drafts > 0))
        self.nbytes = self.bytes_per_slot * num_own
        if self.nbytes > available:
            raise OutOfMemory(
                f"the states of {num_slots} requests (max_num_seqs) need {self.nbytes / GIB:.2f} "
                f"GiB, and {available / GIB:.2f} GiB are free: lower max_num_seqs (at most "
                f"{max(0, num_slots * available // self.nbytes - 1)} fit)",
                param="max_num_seqs",
            )
        self.num_snapshots = 0
        if shares:
            room = int((available - self.nbytes) * SNAPSHOT_SHARE) // self.bytes_per_slot
            self.num_snapshots = min(room, MOST_SNAPSHOTS)
        self._first_snapshot = num_own
        num_states = num_own + self.num_snapshots
        self.nbytes = self.bytes_per_slot * num_states
        self.storage: dict[CachePart, torch.Tensor] = {}
        """Part → [layers with it, num_states, *shape]."""
        bound: dict[StateLayer, dict[str, torch.Tensor]] = {layer: {} for layer in layers}
        for part, sharers in places.items():
            shape = (len(sharers), num_states, *part.shape)
            tensor = make(shape, getattr(torch, part.dtype), device)
            self.storage[part] = tensor
            for number, layer in enumerate(sharers):
                bound[layer][part.name] = tensor[number]
        for layer, states in bound.items():
            layer.bind(states)
        self._device, self._num_drafts, self._on_device = device, num_drafts, on_device
        self._operations: list[NotingOperations] = []
        if num_drafts:
            for layer in layers:
                noting = layer.operations = NotingOperations(layer.operations)  # type: ignore[assignment]
                self._operations.append(noting)
        self._drafted: dict[int, tuple[DraftedStates, torch.Tensor]] = {}
        """Step whose drafts are not verified → its rows with drafts; their places among the
        sampling rows, [D] int64."""

    def caches(self) -> Sequence[torch.Tensor]:
        return tuple(self.storage.values())

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Keep what comes of an earlier request's drafts out of the slot."""
        for drafted, _ in self._drafted.values():
            drafted.leave(start.slot)

    def before(self, part: PartPlan | None, plan: StepPlan) -> None:
        if isinstance(part, StatePlan):
            for copy in part.loads:
                self._copy(self._first_snapshot + copy.snapshot, copy.slot)
        if self._num_drafts:
            self._begin(plan)

    def _begin(self, plan: StepPlan) -> None:
        """Copy the states of rows with drafts, on which the forward pass computes."""
        drafted = self._drafts_of(plan)
        for operations in self._operations:
            operations.drafted = drafted

    def _drafts_of(self, plan: StepPlan) -> DraftedStates | None:
        part = plan.parts.get(speculation.NAME)
        if not isinstance(part, speculation.DraftPlan) or not part.num_drafts:
            return None
        with_drafts = np.asarray(part.num_drafts) > 0
        counts = np.asarray(plan.num_tokens)
        places = np.flatnonzero(with_drafts[np.asarray(plan.samples)])
        upload = PackedUpload(self._device)
        for array in (
            with_drafts * self._num_rows,
            np.flatnonzero(np.repeat(with_drafts, counts)),
            np.asarray(plan.slots)[with_drafts],
            places,
        ):
            upload.add(array.astype(np.int64))
        upload.add(np.concatenate([[0], np.cumsum(counts[with_drafts])]).astype(np.int32))
        offsets, tokens, slots, device_places, starts = upload.send()
        drafted = DraftedStates(
            offsets=offsets, tokens=tokens, slots=slots, starts=starts,
            max_query_len=1 + self._num_drafts, padding_slot=self._num_rows - 1,
            on_device=self._on_device,
        )  # fmt: skip
        for tensor in self.storage.values():
            for states in tensor:  # Layer by layer: what is gathered may be large.
                states.index_copy_(0, slots + self._num_rows, states.index_select(0, slots))
        while len(self._drafted) >= MOST_UNVERIFIED:  # Of steps that failed.
            self._drafted.pop(next(iter(self._drafted)))
        self._drafted[plan.step] = drafted, device_places
        return drafted

    def drafts_verified(self, plan: StepPlan, accepted: torch.Tensor) -> None:
        """Leave the states of rows with drafts after the tokens that are kept."""
        drafted, places = self._drafted.pop(plan.step, (None, None))
        if drafted is not None and places is not None:
            drafted.settle(accepted[places] + 1)

    def recordable(self, plan: StepPlan) -> bool:
        """Launch steps with drafts."""
        part = plan.parts.get(speculation.NAME)
        return not isinstance(part, speculation.DraftPlan) or not part.num_drafts

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
        self.states = make_states(
            start.model, config, device, start.ranks, on_device=start.operations.mixed_states,
            mapped=start.mapped,
        )  # fmt: skip
        self.needs = PartNeeds(nbytes=self.states.nbytes)

    def make(self, site: PartSite) -> States:
        return self.states


def make_states(
    model: nn.Module,
    config: EngineConfig,
    device: torch.device,
    ranks: Ranks = ONE_RANK,
    *,
    on_device: bool = False,
    mapped: MappedMemory | None = None,
) -> States:
    """Return a model's states. Raises OutOfMemory. on_device: operations read rows on the device.
    mapped: what they go into; None: torch's memory.

    A stage's ranks have equally many snapshots, by the least memory.
    """
    space = cache_space(config, device)
    if space is None:
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * config.gpu_memory_utilization) - torch.cuda.memory_allocated(device)
        if mapped is not None:
            budget -= mapped.nbytes
        space = max(0, min(free, budget))
    available = ranks.minimum(space, device)
    stored = {layer: stored_parts(layer, config) for layer in state_layers(model)}
    speculative = config.speculative_config
    return States(
        stored,
        config.max_num_seqs,
        device,
        available,
        shares=config.enable_prefix_caching,
        num_drafts=0 if speculative is None else speculative.num_drafts,
        on_device=on_device,
        make=zeros if mapped is None else mapped.zeros,
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

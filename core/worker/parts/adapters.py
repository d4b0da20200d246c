"""Adapters on the device: what is resident, and which rows of a step use it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch

from ...nn.adapter_sites import (
    ActiveAdapters,
    LayerChange,
    LowRankChange,
    SpecialTokens,
)
from ...nn.operations import Operations
from ...nn.step_operations.adapters import CHUNK_TOKENS, AdapterTables, chunk_count
from ...parallel.ranks import Ranks
from ...parts.adapters import NAME, AdapterInfo, AdapterLoad, AdapterPlan, AdapterStart
from ...step import (
    NOTHING_IN_PROCESS,
    DropAdapter,
    InProcess,
    PartPlan,
    ReadAdapter,
    SlotStart,
    StepPlan,
)
from ..adapters.host_adapters import HostAdapter, HostAdapters
from ..adapters.host_change import HostChange, Piece
from ..adapters.layer_shapes import sharding_of
from ..adapters.pool import AdapterPool
from ..adapters.sites import Sites
from ..batch import LogitPlaces, PersistentBatch, StepInputs
from ..launched_step import LaunchedStep
from .part import PartNeeds, PartSite, PartStart, StartContext, WorkerPart

VARIANT = "adapters"
"""Recorded steps in which rows may have plain adapters."""
LONG_CHUNK = 64
"""Tokens of a chunk in steps with prompts."""
DECODE_TOKENS = 512
"""Tokens of a step up to which chunks have `CHUNK_TOKENS`."""
KNOWN_STEPS = 8
"""Steps whose end on the device can be waited for; older ones have ended."""


class Resident(NamedTuple):
    """An adapter in its place."""

    number: int
    units: tuple[int, ...]
    special: Mapping[str, LayerChange] | None
    """Of a special one, on the device."""
    failure: str | None = None
    """Why its rows fail: there was no memory for it."""
    ready: Any = None
    """The event after its copy; None: there is nothing to wait for."""
    keep: Any = None
    """What the copy reads."""


class StepAdapters(NamedTuple):
    """What rows of a step have adapters, on the host."""

    plain: bool
    special: Sequence[tuple[Resident, np.ndarray]]
    """Special adapters, each with its tokens [N] int64."""
    failed: Mapping[int, str]
    """Row → why."""


NO_ADAPTERS = StepAdapters(False, (), {})


class Adapters(WorkerPart):
    """Which adapters are resident, and which each slot uses."""

    name = NAME
    variants = (VARIANT,)

    def __init__(
        self,
        sites: Sites,
        pool: AdapterPool,
        host: HostAdapters,
        operations: Operations,
        num_slots: int,
        device: torch.device,
        ranks: Ranks,
        max_adapters: int,
    ) -> None:
        """num_slots: besides the scratch slot. max_adapters: of the rows of a step."""
        self._sites, self._pool, self.host = sites, pool, host
        self._operations, self._device, self._ranks = operations, device, ranks
        self._max_adapters = max_adapters
        self._places = np.full(num_slots + 1, -1, dtype=np.int32)
        self._starts = np.zeros(num_slots + 1, dtype=np.int64)
        self._positions = np.zeros(num_slots + 1, dtype=np.int64)
        """Position of each slot's next token; exact for prompts."""
        self._tables = AdapterTables(
            torch.full((num_slots + 1,), -1, dtype=torch.int32, device=device),
            torch.zeros(num_slots + 1, dtype=torch.int64, device=device),
        )
        self._changed = False
        self._residents: dict[int, Resident] = {}
        self._step = NO_ADAPTERS
        self._recording: str | None = None
        self._number = 0
        """Number of the current step."""
        self._unit_steps = np.zeros(pool.num_units, dtype=np.int64)
        """Step that used each unit last."""
        self._ends: deque[tuple[int, Any]] = deque(maxlen=KNOWN_STEPS)
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None

    # ------------------------------------------------------------ jobs

    def read(self, job: ReadAdapter) -> Future[AdapterInfo]:
        """Begin to read an adapter into host memory."""
        return self.host.read(job)

    def drop(self, job: DropAdapter) -> None:
        """Free what an adapter has besides rank rows."""
        self.host.drop(job.number)
        for place, resident in list(self._residents.items()):
            if resident.number == job.number:
                # Its rank rows go to another adapter by a load.
                self._residents[place] = resident._replace(special=None, keep=None)

    @torch.inference_mode()
    def weights_changed(self) -> None:
        """Make special adapters again: factors of DoRA depend on the weights that they change."""
        for place, resident in self._residents.items():
            if resident.special is not None:
                load = AdapterLoad(resident.number, place, resident.units)
                self._residents[place] = self._resident(resident.keep, load)

    def close(self) -> None:
        """End the thread that reads."""
        self.host.close()

    # ------------------------------------------------------------ slots

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Remember a slot's adapter."""
        use = start.parts.get(NAME)
        self.release(start.slot)
        self._positions[start.slot] = start.num_computed_tokens
        if isinstance(use, AdapterStart):
            self._places[start.slot], self._starts[start.slot] = use.place, use.first_position
            self._changed = True

    def release(self, slot: int) -> None:
        """Forget a slot's adapter."""
        if self._places[slot] >= 0:
            self._places[slot] = -1
            self._changed = True

    # ------------------------------------------------------------ a step

    def before(self, part: PartPlan | None, plan: StepPlan) -> None:
        """Queue loads, and find which rows have adapters."""
        self._number += 1
        self._recording = None
        if isinstance(part, AdapterPlan):
            for load in part.loads:
                self._load(load)
        if self._changed:
            self._changed = False
            places, starts = self._tables
            for table, values in ((places, self._places), (starts, self._starts)):
                host = torch.from_numpy(np.array(values))
                host = host.pin_memory() if self._stream is not None else host
                table.copy_(host, non_blocking=True)
        self._step = self._adapters_of(plan)

    def _adapters_of(self, plan: StepPlan) -> StepAdapters:
        slots = np.asarray(plan.slots, dtype=np.int64)
        places = self._places[slots]
        counts = np.asarray(plan.num_tokens, dtype=np.int64)
        firsts = self._positions[slots]
        self._positions[slots] += counts
        if not len(slots) or places.max() < 0:
            return NO_ADAPTERS
        plain = False
        special: list[tuple[Resident, np.ndarray]] = []
        failed: dict[int, str] = {}
        ends = counts.cumsum()
        for place in np.unique(places[places >= 0]).tolist():
            resident, rows = self._residents[place], np.flatnonzero(places == place)
            if resident.units:
                self._unit_steps[list(resident.units)] = self._number
            if resident.ready is not None:
                torch.cuda.current_stream().wait_event(resident.ready)
                resident = self._residents[place] = resident._replace(ready=None)
            if resident.failure is not None:
                failed |= dict.fromkeys(rows.tolist(), resident.failure)
            elif resident.special is None:
                plain = True
            else:
                tokens = [
                    np.arange(
                        ends[row] - counts[row]
                        + max(0, min(counts[row], self._starts[slots[row]] - firsts[row])),
                        ends[row],
                    )
                    for row in rows
                ]  # fmt: skip
                special.append((resident, np.concatenate(tokens)))
        return StepAdapters(plain, special, failed)

    def graph_key(self, plan: StepPlan) -> str | None:
        """Return which recorded variant serves the step."""
        return VARIANT if self._step.plain else None

    def recordable(self, plan: StepPlan) -> bool:
        """Return whether no row has a special adapter."""
        return not self._step.special

    @contextlib.contextmanager
    def recording(self, variant: str | None) -> Iterator[None]:
        """Compute steps of a variant: with adapters, none of which a row has."""
        before, self._recording = self._recording, variant
        try:
            yield
        finally:
            self._recording = before

    @property
    def _plain(self) -> bool:
        return self._step.plain or self._recording == VARIANT

    def context(self, inputs: StepInputs) -> None:
        """Let the layers know the adapters of the step's tokens."""
        state, step = self._sites.state, self._step
        state.active = None
        if not (self._plain or step.special):
            return
        layout = inputs.layout
        assert layout.slots is not None, "the batch lays out slots"
        chunks = None
        if self._plain:
            chunks = self._chunks(layout.slots, layout.query_start, inputs.positions)
        special = [
            SpecialTokens(resident.special or {}, self._to_device(tokens))
            for resident, tokens in step.special
        ]
        state.active = ActiveAdapters(chunks, special)

    def logit_rows(self, places: LogitPlaces | None) -> None:
        """Let the layers know the adapters of rows whose logits are computed."""
        state, step = self._sites.state, self._step
        state.active = None
        if places is None or not (self._plain or step.special):
            return
        chunks = None
        if self._plain:
            count = torch.arange(
                len(places.slots) + 1, dtype=torch.int32, device=places.slots.device
            )
            chunks = self._chunks(places.slots, count, places.lengths - 1)
        special = []
        if step.special:
            assert places.slots_host is not None, "such steps are launched"
            slots = np.asarray(places.slots_host, dtype=np.int64)
            acts = np.ones(len(slots), dtype=bool)
            if places.positions_host is not None:
                acts = places.positions_host >= self._starts[slots]
            numbers = {id(resident): resident for resident, _ in step.special}
            for resident in numbers.values():
                own = np.asarray([
                    self._places[slot] >= 0 and self._residents[int(self._places[slot])] is resident
                    for slot in slots
                ])  # fmt: skip
                rows = np.flatnonzero(own & acts)
                if len(rows):
                    special.append(SpecialTokens(resident.special or {}, self._to_device(rows)))
        state.active = ActiveAdapters(chunks, special)

    def _chunks(
        self, slots: torch.Tensor, query_start: torch.Tensor, positions: torch.Tensor
    ) -> Any:
        num_tokens = len(positions)
        size = CHUNK_TOKENS if num_tokens <= DECODE_TOKENS else LONG_CHUNK
        count = chunk_count(num_tokens, self._max_adapters, size)
        return self._operations.adapter_chunks(
            slots, query_start, positions, self._tables, count, size
        )

    def _to_device(self, numbers: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(numbers.astype(np.int64))
        if self._stream is not None:
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)

    def after(self, part: PartPlan | None, step: LaunchedStep) -> None:
        """Fail rows whose adapter is not there, and note the end of the step."""
        self._sites.state.active = None
        step.failed |= self._step.failed
        if self._stream is not None and (self._step.plain or self._step.special):
            event = torch.cuda.Event()
            event.record()
            self._ends.append((self._number, event))
        self._step = NO_ADAPTERS

    # ------------------------------------------------------------ loads

    def _load(self, load: AdapterLoad) -> None:
        """Queue the copy of an adapter to the device, behind the last step that used its units."""
        host = self.host.find(load.number)
        stream = self._stream
        if stream is None:
            self._residents[load.place] = self._resident(host, load)
            return
        old = self._residents.get(load.place)
        used = int(self._unit_steps[list(load.units)].max()) if load.units else 0
        if old is not None and old.special is not None:
            used = self._number
        for number, event in self._ends:
            if number <= used:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            resident = self._resident(host, load)
            event = torch.cuda.Event()
            event.record()
        self._residents[load.place] = resident._replace(ready=event)

    def _resident(self, host: HostAdapter, load: AdapterLoad) -> Resident:
        number, units = load.number, load.units
        keep = self._pool.load(host.rank_rows, load.place, units)
        if host.rank_rows is not None:
            return Resident(number, units, None, keep=(keep, host))
        try:
            special = {key: self._on_device(key, change) for key, change in host.special.items()}
        except (torch.OutOfMemoryError, MemoryError) as error:
            reason = f"the adapter does not fit into the device's memory: {error}"
            return Resident(number, units, None, reason)
        return Resident(number, units, special, keep=host)

    def _on_device(self, key: str, change: HostChange) -> LayerChange:
        def put(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(self._device)

        return LayerChange(
            low_rank=tuple(self._low_rank(key, piece) for piece in change.pieces),
            weight=put(change.weight),
            weights=tuple((span, value.to(self._device)) for span, value in change.weights),
            biases=tuple((span, value.to(self._device)) for span, value in change.biases),
            token_ids=put(change.token_ids),
            token_rows=put(change.token_rows),
            experts={at: each.weights(self._device) for at, each in change.experts.items()},
        )

    def _low_rank(self, key: str, piece: Piece) -> LowRankChange:
        a, b = piece.a.to(self._device), piece.b.to(self._device)
        bias = None if piece.bias is None else piece.bias.to(self._device).float() * piece.scale
        gain = None
        if piece.magnitude is not None:
            gain = self._gain(key, piece, a, b)
        return LowRankChange(piece.span, a, b, piece.scale, bias, gain)

    def _gain(self, key: str, piece: Piece, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return DoRA's factors: magnitude / length of each row of the changed weight."""
        layer = self._sites.modules[key]
        dense = layer.dense_weight() if hasattr(layer, "dense_weight") else layer.weight
        rows = dense[piece.span].float() + b.float() @ a.float() * piece.scale
        squares = rows.square().sum(dim=1)
        sharding = sharding_of(layer)
        if sharding is not None and sharding.dim == 1:
            squares = self._ranks.tensor.all_reduce(squares)
        assert piece.magnitude is not None, "asked for DoRA alone"
        return piece.magnitude.to(self._device).float() / squares.sqrt()


class AdaptersStart(PartStart):
    """Lets adapters change the model's layers, and takes the memory of their pool."""

    option = "enable_lora"

    def __init__(self, start: StartContext) -> None:
        config = start.config
        self._start = start
        dtype = start.model_config.dtype
        if config.lora_dtype != "auto":
            dtype = getattr(torch, config.lora_dtype)
        self.sites = Sites(start.model, first_rank=start.ranks.tensor.rank == 0)
        self.pool = AdapterPool(self.sites, dtype, config.max_loras, config.max_lora_rank)
        self.needs = PartNeeds(nbytes=self.pool.nbytes)

    def make(self, site: PartSite) -> Adapters:
        """Return the part."""
        return self.make_pooling(site.batch)

    def make_pooling(self, batch: PersistentBatch) -> Adapters:
        """Return the part, which pooled states have, too."""
        start, config = self._start, self._start.config
        self.pool.allocate(start.device)
        host = HostAdapters(
            self.sites, self.pool, config, start.plugins, pinned=start.device.type == "cuda"
        )
        return Adapters(
            self.sites, self.pool, host, start.operations, config.max_num_seqs, start.device,
            start.ranks, config.max_loras,
        )  # fmt: skip

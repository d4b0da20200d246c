"""The worker half of a part: what a capability of a step does on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import msgspec
import torch
from torch import nn

from ...config import EngineConfig
from ...loading.model_config import ModelConfig
from ...loading.second_model import ModelBeside
from ...nn.attention import Attention
from ...nn.operations import Operations
from ...parallel.ranks import Ranks
from ...protocols.attention import LayerSpec, PagedBackend
from ...protocols.models import HiddenStates
from ...registry import Plugins
from ...step import NOTHING_IN_PROCESS, InProcess, PartPlan, SlotStart, StepPlan
from ..launched_step import LaunchedStep
from ..mapped.regions import MappedMemory
from ..per_slot import PerSlot
from ..selection import CacheLayer

if TYPE_CHECKING:
    from ..batch import LogitPlaces, PersistentBatch, StepInputs
    from ..runner import ModelRunner
    from ..sampling.sampling_state import SamplingState

Report: TypeAlias = Callable[[], msgspec.Struct | None]
"""Returns what a part reports with a step, once the step is done; called on another thread."""


class Route(Protocol):
    """One way to launch the rows of a step."""

    def launch(self, plan: StepPlan) -> LaunchedStep | None:
        """Queue the rows of a step; None, with nothing done: this way does not serve it."""


class WorkerPart(PerSlot):
    """Does one capability's work on the launch thread.

    Every method has a default that does nothing, and one that a class does not override is never
    called. Nothing may wait for the device. Calls of a step: `move`; `receive`; `release` and
    `start` of slots; `before`; within the forward pass `context` and `computed`, also while a step
    is recorded as a graph; `upload`, before tokens are sampled; `drafts_verified`; `sampled`;
    `after`; `poll`.
    """

    name: ClassVar[str]
    """Name of the scheduler half, too."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Recorded steps that launch other kernels because of this part, besides the plain ones."""

    def caches(self) -> Sequence[torch.Tensor]:
        """Return the tensors that hold what requests have computed. An engine that sleeps gives
        their memory back; they are zeros afterwards, and no request knows of what was there."""
        return ()

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Remember the request that takes a slot, and nothing of the one before."""

    def release(self, slot: int) -> None:
        """Forget the request of a slot. Safe to call twice, and for a slot that was never taken."""

    def move(self, part: PartPlan, plan: StepPlan) -> None:
        """Rearrange what is cached, before all else: KV transfers of the plan may write to blocks
        that this reads. Called if the plan has a struct of this part, which `before` does not get
        then."""

    def receive(self, part: PartPlan) -> None:
        """Take in what the scheduler half sent: once for each plan that has a struct of this part,
        after every part's `move`, even if one of them raised or the plan is not run because a step
        before it failed. Must not raise."""

    def before(self, part: PartPlan | None, plan: StepPlan) -> None:
        """Queue what must precede the forward pass; slots are up to date but for what the plan
        writes to tables. part: what the scheduler half sent; None: nothing."""

    def context(self, inputs: StepInputs) -> object | None:
        """Return what layers find as `ForwardContext.parts[name]`; None: nothing. While a step is
        recorded, it may depend on addresses of `inputs`, not on numbers."""
        return None

    def computed(self, inputs: StepInputs, hidden: HiddenStates) -> None:
        """Queue what reads the states of all tokens, which logits are computed from: rows in the
        plan's order, then padding. In a pipeline, only the last stage has them. While a step is
        recorded, it may depend on addresses, not on numbers, and write to memory that stays."""

    def logit_rows(self, places: LogitPlaces | None) -> None:
        """Note whose logits are about to be computed; None: of no request. As `context`, also while
        a step is recorded."""

    def recordable(self, plan: StepPlan) -> bool:
        """Return whether a recorded graph may serve the step."""
        return True

    def graph_key(self, plan: StepPlan) -> str | None:
        """Return which of `variants` serves the step; None: any recorded step does."""
        return None

    def recording(self, variant: str | None) -> AbstractContextManager[None]:
        """Return a context in which forward passes are of one of `variants`, without requests: to
        compile, to warm up or to record them."""
        return nullcontext()

    def sampled(self, plan: StepPlan, output: dict[str, torch.Tensor], rows: Sequence[int]) -> None:
        """Queue what must follow sampling. output: tensors that are about to be copied to the host;
        the part may add its own, and finds them in `step.output` when it reports. `chosen` [N]
        int32 has the tokens, rows [N] the plan's row of each; a recorded step may have more, and
        without rows there are none."""

    def drafts_verified(self, plan: StepPlan, accepted: torch.Tensor) -> None:
        """Queue what depends on how many drafts were accepted, [sampling rows] int32; in a step
        with drafts alone. In stages before the last: before a later step with one of its rows."""

    def after(self, part: PartPlan | None, step: LaunchedStep) -> Report | None:
        """Queue what must follow the step; `step.failed` may get rows. Return what the result will
        say; None: nothing."""
        return None

    def poll(self) -> Report | None:
        """Return what the result of a launched plan will say, which may have no rows; None:
        nothing. Reports of `after` are read first, so that one which raises leaves this unread."""
        return None

    def routes(self, runner: ModelRunner) -> Sequence[Route]:
        """Return ways to launch steps, which are tried before those of all steps."""
        return ()

    def run_scratch(self, num_tokens: int) -> None:
        """Do what `before` does for as many tokens, without a request, on the null block: so that
        kernels are compiled, and the memory of a step is measured."""

    def run_largest(self) -> int:
        """Do what takes most memory of what requests make it do besides steps, without a request:
        it is measured, so that blocks leave it free. Return the bytes that stay taken afterwards,
        beside steps and beside doing it again."""
        return 0

    def run_largest_recorded(self) -> None:
        """Do what takes most memory of what is recorded besides steps; as `run_largest`."""

    def warm_up(self) -> None:
        """Launch what is launched outside of the forward pass, so that it is compiled."""

    models: Sequence[ModelBeside] = ()
    """Models of its own, whose weights an update may bring and a sleep puts away."""
    methods: ClassVar[frozenset[str]] = frozenset()
    """Names of methods that `AsyncEngine.collective_rpc` may call, on every rank, between two
    steps. What they take and return is plain data, as msgspec encodes it."""

    def weights_changed(self) -> None:
        """Compute again what was computed from the model's weights: they have others from now on,
        in the same memory. No step is in flight."""

    def close(self) -> None:
        """End what runs besides steps, such as threads; the engine stops."""


@dataclass(frozen=True)
class PartNeeds:
    """What a worker must have for a part."""

    operations: frozenset[str] = frozenset()
    """Features of `Operations`."""
    refuses: Callable[[type[PagedBackend]], str | None] | None = None
    """Attention backend → why it does not serve with the part, in a clause; None: it does."""
    specs: Sequence[LayerSpec] = ()
    """Specs of layers that attend to something else than the sequence."""
    nbytes: int = 0
    """Bytes of device memory that it holds besides blocks."""
    later_bytes: int = 0
    """Bytes that it comes to hold while requests run, for a cache whose size is given: else
    `WorkerPart.run_largest` says how many."""
    extra_tables: int = 0
    """Block tables of a slot besides those of groups of layers, for sequences of the same length at
    most."""
    batch: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `PersistentBatch`."""
    model: nn.Module | None = None
    """A loaded model besides the engine's, whose attention layers join the cache."""
    own_blocks: int = 0
    """Blocks of these layers, per slot and group, besides those of requests: at the end of a cache,
    those of the scratch slot last."""


@dataclass(frozen=True)
class StartContext:
    """What is known when parts begin to start."""

    config: EngineConfig
    model_config: ModelConfig
    plugins: Plugins
    ranks: Ranks
    device: torch.device
    model: nn.Module
    operations: Operations
    layers: Sequence[CacheLayer]
    """Those with a paged cache."""
    key_values: Sequence[Attention]
    """Those of `layers` that cache keys and values."""
    kv_dtype: torch.dtype
    mapped: MappedMemory | None = None
    """What caches go into; None: torch's memory."""


class PartStart:
    """Starts a part: says what it needs, then makes it.

    Raises ConfigError in its constructor for what the part cannot serve, with the option's name.
    """

    option: str
    """The option that turns the part on, for messages."""
    needs: PartNeeds = PartNeeds()

    def make(self, site: PartSite) -> WorkerPart:
        """Return the part."""
        raise NotImplementedError

    def make_pooling(self, batch: PersistentBatch) -> WorkerPart | None:
        """Return the part for a model whose states are pooled; None: it does nothing there."""
        return None

    def bind(self, caches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Use memory of the cache: [layers that share no memory], parts by name. Called again when
        the cache has its size."""

    def complete(self, num_blocks: int) -> Mapping[str, Any]:
        """Do what needs the whole cache, once all else is ready for the first step. Return what the
        scheduler must know: fields of `ExecutorInfo`."""
        return {}


@dataclass(frozen=True)
class PartSite:
    """What a part is made for."""

    batch: PersistentBatch
    """Made by what parts need."""
    sampling: SamplingState
    make_backend: Callable[[int, int], PagedBackend]
    """Tokens of the longest sequence, and number of rows → an attention backend for them, of the
    chosen class."""
    layers_backend: Callable[[Sequence[CacheLayer]], PagedBackend]
    """Layers of a `PartNeeds.model` → an attention backend for them."""

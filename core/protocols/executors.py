"""The contracts of executors and schedule policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from ..cache.groups import ONE_GROUP, CacheGroup
from ..cache.level_options import LevelFormat
from ..parts.routed_experts import RoutedShape
from ..step import InProcess, StepPlan, StepResult, WorkerJob

if TYPE_CHECKING:
    import asyncio
    import socket

    from ..config import EngineConfig
    from ..loading.model_config import ModelConfig
    from ..registry import Plugins
    from ..request import Request
from .kv import KVLayout


class Executor(ABC):
    """Runs the worker's ranks. The event loop accesses the worker only through it.

    A class that does not subclass this one gets the defaults of the methods that it lacks.
    """

    tensor_parallel: ClassVar[bool] = False
    """Whether it starts `EngineConfig.tensor_parallel_size` ranks (`core.parallel.join`), however
    many; False: one, and more are refused. `auto` takes the first executor by priority that runs
    as many as there are, so importing the class should be cheap."""
    pipeline_parallel: ClassVar[bool] = False
    """Whether it starts ranks for each of `EngineConfig.pipeline_parallel_size` stages; False:
    more than one are refused."""
    data_parallel: ClassVar[bool] = False
    """Whether each of `EngineConfig.data_parallel_size` engines may have one: they are processes of
    one host, with devices that only they see, or where `engine_hosts` says. False: more than one
    engine are refused."""
    joins_engines: ClassVar[bool] = False
    """Whether its ranks also join those of the other engines, which are processes of this host, to
    divide a mixture's experts among all (`core.parallel.join`); False: `EngineConfig` with
    `data_parallel_size` and `enable_expert_parallel` is refused."""
    joins_hosts: ClassVar[bool] = False
    """Whether its ranks may be on `EngineConfig.nnodes` hosts; False: more than one are refused."""
    moves_experts: ClassVar[bool] = False
    """Whether its ranks do `BalanceExperts`; False: `EngineConfig.enable_eplb` is refused."""

    @abstractmethod
    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, plugins: Plugins
    ) -> None: ...

    @staticmethod  # noqa: B027
    def start_ahead(config: EngineConfig) -> None:
        """Begin what takes long and needs neither a model nor a device, such as starting processes.
        Default: nothing.

        Called before `initialize_device`, perhaps more than once for one engine, and perhaps for
        one that does not start.
        """

    @staticmethod
    def run_host(config: EngineConfig, node_rank: int) -> int:
        """Run the ranks of one of `EngineConfig.nnodes` hosts other than the first, until they end.
        Return the exit status. Called if `joins_hosts`. Raises ConfigError, RankFailed."""
        raise NotImplementedError

    @staticmethod
    def engine_hosts(config: EngineConfig) -> EngineHosts | None:
        """Return what starts the engines of `EngineConfig.data_parallel_size`; default: None, and
        they are processes of this host, each with some of its devices. Cheap."""
        return None

    @staticmethod  # noqa: B027
    def initialize_device(config: EngineConfig, plugins: Plugins) -> None:
        """Do the parts of a start that do not depend on the model. Default: nothing; `start` does
        all.

        Called on a thread, while the model's configuration is read and before `__init__`. A failure
        here must be raised again by `start`.
        """

    @abstractmethod
    async def start(self) -> ExecutorInfo:
        """Load the model, size the cache, warm up."""

    @abstractmethod
    def submit(self, plan: StepPlan, in_process: InProcess) -> asyncio.Future[StepResult]:
        """Queue one step; plans run in order. The future fails if the step as a whole does.
        Raises if it does not accept the plan.

        The plan can be encoded and sent. `in_process` has the objects of this process that belong
        to it: a worker elsewhere makes its own, from `SlotStart.params` and `SlotStart.grammar`.
        """

    @abstractmethod
    def ask(self, job: WorkerJob) -> asyncio.Future[Any]:
        """Queue a job behind the plans and jobs before it → what its class says.

        The future fails with NotImplementedError for a job that this executor does not do. Without
        `Ping`, it counts as alive until a step fails (`AsyncEngine.check_health`); without
        `Recover`, a failed step ends the engine; without `PrepareAhead`, nothing is prepared while
        the engine is idle.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Finish what is queued, free the device. Safe to call twice."""

    def ranks(self) -> Sequence[RankState]:
        """Return how each rank is doing, for metrics; default: (), which tells nothing."""
        return ()

    def watch_failure(self, callback: Callable[[Exception], None]) -> None:  # noqa: B027
        """Call `callback` on the event loop, once, if the executor cannot go on, also when nothing
        is queued: the engine ends with that error. Default: it is never called, and the engine
        learns of it by the next step.

        Called once, before `start`.
        """

    def watch_transfers(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop when a KV connector's worker half has something to
        report. Default: raises NotImplementedError, and connectors are refused.

        Called once, before `start`, and only if a connector is configured.
        """
        raise NotImplementedError(f"{type(self).__name__} serves no KV connectors")


class EngineProcess(Protocol):
    """The process of one of several engines."""

    connection: socket.socket
    """To the process, where `core.data_parallel.member_engine.serve` has the other end."""
    where: str
    """Its host, with a preposition before it, for messages; "": this one."""

    def ending(self) -> str | None:
        """Return how it has ended, as the rest of a sentence about it; None: it has not, as far as
        is known."""

    def kill(self) -> None:
        """End it now. Harmless after its end."""

    async def release(self) -> None:
        """Give back what it had. Called once, after its end."""


class EngineHosts(Protocol):
    """Where the engines of `EngineConfig.data_parallel_size` run."""

    async def start(self, number: int) -> EngineProcess:
        """Start the process of an engine, by its number from 0, or start it again. Raises if there
        is no room for its ranks."""


class ExecutorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a started executor."""

    num_blocks: int
    """Number of KV blocks, the null block included; 0: the model has no cache."""
    device: str
    dtype: str
    attention_backend: str
    attention_reason: str
    """Why this backend was chosen, in one clause."""
    weight_bytes: int
    kv_cache_bytes: int
    block_bytes: int = 0
    """Of a KV block."""
    load_seconds: float
    kv_layout: KVLayout | None = None
    """Set if a KV connector is configured."""
    cache_groups: tuple[CacheGroup, ...] = ONE_GROUP
    """Layers that share a block table."""
    parts: tuple[str, ...] = ()
    """Names of the parts (`core.worker.parts`) that its worker has: an option that needs another is
    refused."""
    num_snapshots: int | None = None
    """Snapshots of states that there is room for; 0: prefixes of models with states are not shared.
    None: layers keep no states, so that blocks alone hold a prefix."""
    routed_experts: RoutedShape | None = None
    """What is kept of each token's routing; None: nothing."""
    max_model_len: int | None = None
    """Tokens of the longest sequence that fits in the cache, where `EngineConfig.max_model_len` is
    auto; None: the model's context."""
    level_formats: tuple[LevelFormat, ...] = ()
    """How blocks of each level of `EngineConfig.kv_compression_levels` are filled."""
    row_width: int = 0
    """Numbers of a row that stands in the place of a token's embedding, those of further levels
    included; 0: none does."""
    num_ranks: int = 1
    """Ranks that compute the model together; bytes are those of one."""
    num_stages: int = 1
    """Stages that steps pass through one after the other, each with some of the layers: requests
    take turns, so that all stages have work (`core.scheduling.pipeline`)."""
    steps_in_flight: int = 2
    """Plans that are submitted before the result of the first one is there, at most. With stages,
    one more than these: the next step waits at the first stage."""

    @property
    def where(self) -> str:
        """The device, and how many ranks there are, for messages."""
        return self.device if self.num_ranks == 1 else f"{self.device}, {self.num_ranks} ranks"


class RankState(msgspec.Struct, frozen=True):
    """How one of several ranks is doing."""

    rank: int
    host: str
    """Name of its host."""
    steps: int
    """Steps and jobs that it has finished."""
    weight_bytes: int
    kv_cache_bytes: int


class SchedulePolicy(Protocol):
    """Orders requests and selects the one to preempt. Created once per engine, without
    arguments."""

    def key(self, request: Request) -> tuple[Any, ...]:
        """Return the request's sort key; smallest first. The running request with the largest key
        is preempted.

        Called once, when the request is added; the key stays the same for the request's life. Equal
        keys are served in order of addition. A tuple of numbers, texts, bytes or such tuples, of
        one shape for all requests, those for a vector too, and without NaN, so that any two
        compare: another key, or an exception, refuses this request alone. The request must not be
        changed. Called on the event loop: the cost must not grow with the number of earlier
        requests.
        """

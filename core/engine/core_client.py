"""The port between the public face of an engine and the core that runs its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import prometheus_client as prometheus

from ..config import EngineConfig
from ..loading.model_config import ModelConfig
from ..lora_request import AdapterCard, AdapterJob
from ..metrics.merge import Family
from ..outputs import EngineStats
from ..protocols.executors import ExecutorInfo
from ..request import Request, RequestSpec
from .output_processor import RequestTracker, State
from .plugin_events import PluginEvents
from .request_state import RequestState
from .text_processor import TextProcessor

S = TypeVar("S", bound=State)
HEALTH_SECONDS = 30.0
"""A worker that neither replies nor ends a step for this long is at fault."""


class CoreClient(Protocol):
    """Runs requests: here (`EngineCore`), in another process (`RemoteCore`), or in several
    (`PooledCores`).

    All methods belong to the event loop that called `start`.
    """

    config: EngineConfig
    """Resolved once started."""
    model_config: ModelConfig
    """Set once started."""
    info: ExecutorInfo
    """Set once started."""
    requests: RequestTracker
    """Live requests of this process, and whether more are accepted."""

    @property
    def in_process(self) -> bool:
        """Whether the core is in this process, so that its start and end are announced here."""

    @property
    def registry(self) -> prometheus.CollectorRegistry:
        """The metrics of this process. Set once started."""

    async def start(self, texts: TextProcessor, events: PluginEvents) -> None:
        """Start the core, and load `texts` meanwhile. Leaves nothing behind if it raises.

        Raises ConfigError, LoadError, OutOfMemory, PluginError, EngineStopped.
        """

    async def stop(self) -> None:
        """Stop the core, or disconnect from it. Safe to call twice, and before `start`."""

    def check_open(self) -> None:
        """Raise EngineStopped or EngineOverloaded unless a request may begin now."""

    async def add_request(self, spec: RequestSpec, make_state: Callable[[list[Request]], S]) -> S:
        """Schedule an accepted request. Return its state, which `make_state` creates from the
        scheduler's requests.

        Raises as `check_open` does, InvalidRequest for a grammar that does not compile or if the
        request's id is in use, and RequestFailed if the schedule policy fails on it.
        """

    async def ask_adapters(self, job: AdapterJob) -> list[AdapterCard]:
        """Do what an `AdapterJob` says, and return its cards. Raises as it says, and
        InvalidRequest without `enable_lora`."""

    def abort_request(self, state: State) -> None:
        """End what is left of a request."""

    async def check_health(self, timeout: float) -> dict[str, str]:
        """Raise EngineStopped unless the step loop and the worker reply within `timeout` seconds
        or a step ended meanwhile.

        Of several engines (`data_parallel_size`) one is enough; return what is the matter with the
        others, by their names."""

    async def reset_prefix_cache(self) -> bool:
        """Forget cached blocks. Return False if some are in use."""

    def stats(self) -> EngineStats:
        """Return a snapshot."""

    async def render_metrics(self) -> bytes:
        """Return all metrics of the engine, of every process, in Prometheus' text format."""

    def report_load(self, count: Callable[[], int]) -> None:
        """Register `count`, the inference requests of one HTTP server of this process."""

    async def server_load(self) -> int:
        """Return the number of inference requests that all processes serve."""


class ServedCore(CoreClient, Protocol):
    """A core that front ends in other processes can use (`EngineServer`)."""

    def finish_completion(self, state: RequestState, index: int, stop: str) -> None:
        """End one completion at a stop string that a front end found."""

    async def metric_families(self) -> list[Family]:
        """Return all metrics of the core as they stand."""

"""The port between an engine's public face and its core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import prometheus_client as prometheus

from ..config import EngineConfig
from ..live.engine_jobs import LiveJob
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
"""Silence of a worker, without a reply or a finished step, that counts as failure."""


class CoreClient(Protocol):
    """Runs requests: here (`EngineCore`), in another process (`RemoteCore`), or in several
    (`PooledCores`).

    All methods belong to the event loop that called `start`.
    """

    config: EngineConfig
    model_config: ModelConfig
    info: ExecutorInfo
    requests: RequestTracker
    """This process's live requests, and whether more are accepted."""

    @property
    def in_process(self) -> bool:
        """Whether its start and end are announced in this process."""

    @property
    def registry(self) -> prometheus.CollectorRegistry:
        """This process's metrics. Set once started."""

    async def start(self, texts: TextProcessor, events: PluginEvents) -> None:
        """Start the core, loading `texts` in parallel. Cleans up if it raises.

        Raises ConfigError, LoadError, OutOfMemory, PluginError, EngineStopped.
        """

    async def stop(self) -> None:
        """Stop or disconnect. May be called twice, and before `start`."""

    def check_open(self) -> None:
        """Raise EngineStopped or EngineOverloaded unless a request may begin now."""

    async def add_request(self, spec: RequestSpec, make_state: Callable[[list[Request]], S]) -> S:
        """Schedule an accepted request. Return its state, created by `make_state` from the
        scheduler's requests.

        Raises as `check_open`, InvalidRequest for a bad grammar or a used id, and RequestFailed if
        the schedule policy fails.
        """

    async def ask_adapters(self, job: AdapterJob) -> list[AdapterCard]:
        """Do what an `AdapterJob` says, and return its cards. Raises as it says, and
        InvalidRequest without `enable_lora`."""

    async def ask_live(self, job: LiveJob) -> dict[str, Any]:
        """Do what a `LiveJob` says, and return its answer. Raises as it says."""

    def abort_request(self, state: State) -> None:
        """End what is left of a request."""

    async def check_health(self, timeout: float) -> dict[str, str]:
        """Raise EngineStopped unless the step loop and the worker reply, or a step ends, within
        `timeout` seconds.

        One of several engines suffices; return the others' problems by name.
        """

    async def reset_prefix_cache(self) -> bool:
        """Forget cached blocks. Return False if some are in use."""

    async def compact_kv_cache(self) -> int:
        """Compact running requests' caches with their next steps, where blocks come back. Return
        how many. Raises InvalidRequest without `kv_compression`."""

    async def start_profile(self) -> None:
        """Begin a profile. Raises InvalidRequest, RequestFailed."""

    async def stop_profile(self) -> list[str]:
        """End a profile; return each engine's trace. Raises InvalidRequest, RequestFailed."""

    def stats(self) -> EngineStats:
        """Return a snapshot."""

    async def render_metrics(self) -> bytes:
        """Return the metrics of all processes, in Prometheus' text format."""

    def report_load(self, count: Callable[[], int]) -> None:
        """Register `count`, an HTTP server's inference requests."""

    async def server_load(self) -> int:
        """Return all processes' inference requests."""


class ServedCore(CoreClient, Protocol):
    """A core for front ends in other processes (`EngineServer`)."""

    def finish_completion(self, state: RequestState, index: int, stop: str) -> None:
        """End a completion at a stop string that a front end found."""

    async def metric_families(self) -> list[Family]:
        """Return all metrics of the core as they stand."""

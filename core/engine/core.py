"""`EngineCore`: everything that runs requests: scheduler, step loop, executor, output processor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import prometheus_client as prometheus

from ..adapters.registry import AdapterRegistry
from ..cache.events import KVCacheInfo
from ..config import EngineConfig
from ..errors import EngineOverloaded, EngineStopped, InvalidRequest, JackfieldError, PluginError
from ..live.engine_jobs import LiveJob, ReadFiles
from ..loading.model_config import ModelConfig, resolve_model_config
from ..lora_request import AdapterCard, AdapterJob
from ..metrics.adapter_metrics import AdapterMetrics
from ..metrics.merge import Family, families
from ..metrics.metrics import EngineMetrics
from ..metrics.rank_metrics import RankMetrics
from ..outputs import EngineStats
from ..protocols.executors import Executor, ExecutorInfo
from ..recording.recorder import RecordingExecutor
from ..recording.recording import Writer
from ..registration.failing_plugin import plugin_failure
from ..registry import Plugins
from ..request import Request, RequestSpec, draw_seed
from ..scheduling.parts.adapters import Adapters
from ..scheduling.parts.guarded_connector import GuardedConnector
from ..scheduling.parts.kv_compression import KVCompression
from ..scheduling.parts.kv_transfer import KVTransfer
from ..scheduling.parts.rounds import Rounds
from ..scheduling.scheduler import Scheduler
from ..step import CompiledGrammar, StepPlan, StepResult
from .admission import check_limits
from .cache_hooks import CacheHooks
from .core_client import S
from .grammars import Grammars
from .kv_connector import connect, numbered, watch_transfers
from .live_control import LiveControl
from .make_scheduler import make_scheduler
from .other_engines import OtherEngines
from .output_processor import OutputProcessor, RequestTracker, State
from .plugin_events import PluginEvents
from .profiling import Profiler
from .quiesce import Quiesce
from .request_state import RequestState
from .resolve_config import (
    check_names,
    fitted,
    resolve_config,
    resolve_parsers,
    resolve_runner,
)
from .start_log import log_start
from .step_loop import BalanceTimes, StepLoop
from .text_processor import TextProcessor
from .worker_check import WorkerCheck

logger = logging.getLogger("jackfield.engine")


@contextlib.contextmanager
def logged(action: str) -> Iterator[None]:
    """Log and suppress an error at an engine's end, so that its other parts end too."""
    try:
        yield
    except Exception:
        logger.exception("%s failed", action)


def _check_encodable(spec: RequestSpec, grammar: CompiledGrammar | None) -> None:
    """Raise InvalidRequest for values that cannot be sent to other ranks, such as integers beyond
    64 bits, which would fail whole steps.
    """
    start = None if grammar is None else grammar.start
    try:
        msgspec.msgpack.encode((spec.params, spec.pooling, start))
    except (OverflowError, RecursionError, TypeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"a value cannot be sent to the other ranks: {error}") from None


class EngineCore:
    """Schedules requests onto an executor of this process. A `CoreClient`."""

    in_process = True
    model_config: ModelConfig
    info: ExecutorInfo
    metrics: EngineMetrics
    executor: Executor
    scheduler: Scheduler
    outputs: OutputProcessor
    grammars: Grammars
    events: PluginEvents
    live: LiveControl

    def __init__(self, config: EngineConfig, plugins: Plugins, member: int = 0) -> None:
        """member: the engine's number, of several (`data_parallel_size`)."""
        self.config = numbered(config, member)
        self.plugins = plugins
        self.member = member
        self.requests = RequestTracker()
        self.steps: StepLoop | None = None
        """None before the start."""
        self._connector: GuardedConnector | None = None
        self._seeds = random.Random(config.seed)
        self._stopping = False
        self._executor_error: Exception | None = None
        """Why the executor cannot continue."""
        self._cache_hooks = CacheHooks(plugins)
        self._loads: list[Callable[[], int]] = []
        self.adapters: AdapterRegistry | None = None
        """None before the start, and without `enable_lora`."""

    @property
    def registry(self) -> prometheus.CollectorRegistry:
        return self.metrics.registry

    # ------------------------------------------------------------ start and stop

    async def start(self, texts: TextProcessor, events: PluginEvents) -> None:
        """Load the model and, in parallel, `texts`; then begin stepping."""
        began = time.monotonic()
        await self._resolve()
        executors, name = self.plugins["executor"], self.config.executor
        with executors.calling(name, "its constructor"):
            self.executor = executors.load(name)(self.config, self.model_config, self.plugins)
        self.executor.watch_failure(self._executor_failed)
        if self.config.kv_transfer_config is not None:
            watch_transfers(self.executor, self._expect_transfer_report)
        writer = None if self.config.record_steps is None else Writer(self.config.record_steps)
        with executors.calling(name, "start"):
            starting = asyncio.ensure_future(self.executor.start())
        try:
            await asyncio.to_thread(texts.load, self.config, self.model_config, self.plugins)
            with executors.calling(name, "start"):
                self.info = await starting
            if self.info.max_model_len is not None:
                most, fits = self.model_config.max_model_len, self.info.max_model_len
                logger.info("max_model_len auto: %d of the model's %d tokens", fits, most)
                self.model_config = fitted(self.model_config, self.info)
            if writer is not None:
                self.executor = await RecordingExecutor.begin(
                    self.executor, writer, self.config, self.info
                )
            self._connector = connect(self.config, self.info, self.plugins, self._wake)
            self._build(texts, events)
            if self.adapters is not None:
                await self.adapters.start()
            self._start_cache_hooks()
        except BaseException:
            await asyncio.gather(starting, return_exceptions=True)
            await (self.executor.stop() if self.steps is None else self.stop())
            if writer is not None:
                writer.discard()
            raise
        log_start(time.monotonic() - began, self.config, self.model_config, self.info)

    async def _resolve(self) -> None:
        """Resolve the configuration while the executor prepares the device."""
        unresolved, plugins = self.config, self.plugins
        check_names(unresolved, plugins)
        config = resolve_config(unresolved, plugins)
        executor_class = plugins["executor"].load(config.executor)
        executor_class.start_ahead(config)
        ready = asyncio.ensure_future(
            asyncio.to_thread(executor_class.initialize_device, config, plugins)
        )
        try:
            model_config = await asyncio.to_thread(resolve_model_config, config, plugins)
        finally:
            # The executor's start fails with the same error of the device again, and reports it.
            await asyncio.gather(ready, return_exceptions=True)
        config, self.model_config = await asyncio.to_thread(
            resolve_runner, unresolved, config, model_config, plugins
        )
        self.config = resolve_parsers(config, self.model_config, plugins)

    def _build(self, texts: TextProcessor, events: PluginEvents) -> None:
        """Create the parts that need the executor's info, and begin stepping."""
        config, model_config, plugins = self.config, self.model_config, self.plugins
        if self.info.steps_in_flight < 1:
            name = plugins["executor"].described(config.executor)
            raise PluginError(f"{name}: its steps_in_flight must be at least 1")
        self.events = events
        self.metrics = self._make_metrics()
        self.grammars = Grammars(
            plugins,
            config,
            texts.tokenizer,
            model_config.vocab_size,
            model_config.eos_token_ids,
            texts.prompt_end,
        )
        self.scheduler = make_scheduler(
            config, model_config, self.info, plugins, self._connector, self._other_engines(),
            self._described,
        )  # fmt: skip
        self._limits = self.scheduler.limits
        self.adapters = self._make_adapters()
        self.outputs = OutputProcessor(self.requests, self.scheduler, self.metrics, events)
        self.steps = StepLoop(
            self.scheduler,
            self.executor,
            steps_in_flight=self.info.steps_in_flight,
            num_stages=self.info.num_stages,
            publish=self.outputs.publish,
            stepped=self._step_finished,
            died=self._die,
            balancing=self._balance_times(),
        )
        self.live = LiveControl(
            ReadFiles(path=str(model_config.path), load_format=config.load_format),
            Quiesce(self.scheduler, self.steps, self.outputs),
            self.scheduler,
            self.executor,
            num_ranks=self.info.num_ranks,
            recorded=config.record_steps is not None,
            die=self._executor_failed,
        )
        self._worker_check = WorkerCheck(self.executor, self.scheduler)
        self._profiler = Profiler(config.profiler_config, self.steps, self.executor)
        self.steps.start()
        if self._executor_error is not None:
            self.steps.fail(self._executor_error)

    def _make_metrics(self) -> EngineMetrics:
        config, model_name = self.config, self.config.served_names[0]
        metrics = EngineMetrics(model_name)
        metrics.observe_cache_config(
            block_size=config.block_size,
            num_gpu_blocks=self.info.num_blocks,
            cache_dtype=config.kv_cache_dtype,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        if self.info.num_ranks > 1:
            metrics.registry.register(RankMetrics(model_name, self.executor.ranks))
        return metrics

    def _make_adapters(self) -> AdapterRegistry | None:
        part = self.scheduler.part(Adapters)
        if part is None:
            return None
        config = self.config
        adapters = AdapterRegistry(
            config, part, self.plugins, ask=self.executor.ask, wake=self._wake
        )
        self.metrics.registry.register(
            AdapterMetrics(config.served_names[0], config.max_loras, adapters.counts)
        )
        return adapters

    def _start_cache_hooks(self) -> None:
        """Raises ConfigError, PluginError."""
        if self.info.num_blocks:
            info = KVCacheInfo(
                member=self.member,
                block_size=self.config.block_size,
                num_blocks=self.info.num_blocks,
                groups=tuple(self.info.cache_groups),
                enable_prefix_caching=self.config.enable_prefix_caching,
            )
            self._cache_hooks.start(info, self.scheduler.kv)

    def _other_engines(self) -> OtherEngines | None:
        """Return the engines that divide the experts with this one; None: none do."""
        if not self.config.divides_experts_among_engines:
            return None

        def asked(wave: int) -> None:
            rounds = self.scheduler.part(Rounds)
            assert rounds is not None, "it announces waves"
            rounds.ask(wave)
            self._wake()

        return OtherEngines(asked)

    def _balance_times(self) -> BalanceTimes | None:
        eplb = self.config.eplb_config
        if not self.config.enable_eplb:
            return None
        return BalanceTimes(eplb.step_interval, eplb.window_size)

    async def stop(self) -> None:
        """End the steps, and free the device; errors are logged."""
        if self.steps is None:
            return
        self._stopping = True
        with logged("ending leases"):
            await self.live.close()
        with logged("stopping the step loop"):
            await self.steps.stop()
        if self.adapters is not None:
            with logged("closing the adapters"):
                await self.adapters.close()
        with logged("closing the grammars"):
            await self.grammars.close()
        if self._connector is not None:
            with logged("closing the KV connector"):
                self._connector.close()
        with logged("stopping the executor"):
            await self.executor.stop()

    def _check_running(self) -> None:
        """Raise EngineStopped once the executor may do nothing any more."""
        if self._stopping:
            raise EngineStopped("the engine is stopping or stopped")

    # ------------------------------------------------------------ requests

    def check_open(self) -> None:
        self.requests.check_accepting()
        if self.steps is not None:
            self.live.quiesce.check_open(self.num_waiting)
        limit = self.config.max_waiting_requests
        if limit is not None and self.num_waiting >= limit:
            raise EngineOverloaded(f"{limit} requests are waiting already; try again later")

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait to run, or for their adapter."""
        reading = 0 if self.adapters is None else self.adapters.num_waiting
        return self.scheduler.num_waiting + reading

    async def add_request(self, spec: RequestSpec, make_state: Callable[[list[Request]], S]) -> S:
        grammar: CompiledGrammar | None = None
        if spec.params.structured_outputs is not None:
            grammar = await self.grammars.prepare(
                spec.params,
                chat=spec.grammar.chat,
                template_arguments=spec.grammar.template_arguments,
            )
        if self.info.num_ranks > 1:
            _check_encodable(spec, grammar)
        if spec.adapter is not None:
            # The last wait: the adapter stays in memory until the request is added.
            spec = await self._registry().applied(spec)
        self.check_open()
        if self.scheduler.limits != self._limits:  # Blocks were lost since admission's were made.
            check_limits(self.scheduler.limits, len(spec.prompt_token_ids), spec.max_tokens)
        seed = spec.params.seed if spec.drawn_seed is None else spec.drawn_seed
        if seed is None:
            seed = draw_seed(self._seeds)
        state = make_state(spec.requests(seed=seed, grammar=grammar))
        with self._dying_of_errors():
            self.outputs.enter_request(state)
        if self.steps is not None:
            self.steps.arrived()
        return state

    @contextlib.contextmanager
    def _dying_of_errors(self) -> Iterator[None]:
        """End the engine on an internal error: queues or parts may be inconsistent."""
        try:
            yield
        except JackfieldError:
            raise
        except Exception as error:
            if self.steps is not None:
                self.steps.fail(error)
            raise

    def _registry(self) -> AdapterRegistry:
        if self.adapters is None:
            raise InvalidRequest(
                "lora_request: this engine serves no adapters (enable_lora)", param="lora_request"
            )
        return self.adapters

    async def ask_adapters(self, job: AdapterJob) -> list[AdapterCard]:
        """Do what an `AdapterJob` says, and return its cards."""
        self._check_running()
        return await self._registry().do(job)

    def abort_request(self, state: State) -> None:
        with self._dying_of_errors():
            self.outputs.abort_request(state)
        self._wake()

    def finish_completion(self, state: RequestState, index: int, stop: str) -> None:
        with self._dying_of_errors():
            self.outputs.finish_completion(state, index, stop)
        self._wake()

    # ------------------------------------------------------------ state

    async def check_health(self, timeout: float) -> dict[str, str]:
        if self.steps is None or not (self.requests.healthy and self.steps.running):
            raise EngineStopped(self.requests.dead_reason or "the engine is not running")
        await self._worker_check.run(timeout)
        return {}

    async def ask_live(self, job: LiveJob) -> dict[str, Any]:
        """Do what a `LiveJob` says, and return its answer."""
        self._check_running()
        return await self.live.do(job)

    async def reset_prefix_cache(self) -> bool:
        return self.scheduler.reset_prefix_cache()

    async def compact_kv_cache(self) -> int:
        part = self.scheduler.part(KVCompression)
        if part is None:
            raise InvalidRequest(
                "this engine compresses no caches (its option kv_compression names no compressor)"
            )
        return part.compact_all()

    async def start_profile(self) -> None:
        await self._profiler.start()

    async def stop_profile(self) -> list[str]:
        return [await self._profiler.stop()]

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            self.scheduler.stats, requests_finished=dict(self.outputs.finished_counts)
        )

    async def metric_families(self) -> list[Family]:
        self.metrics.observe_stats(self.stats())
        return families(self.metrics.registry)

    async def render_metrics(self) -> bytes:
        self.metrics.observe_stats(self.stats())
        return self.metrics.render()

    def report_load(self, count: Callable[[], int]) -> None:
        self._loads.append(count)

    async def server_load(self) -> int:
        return sum(count() for count in self._loads)

    def check_idle(self) -> None:
        self.outputs.check_idle()

    # ------------------------------------------------------------ callbacks

    def _wake(self) -> None:
        if self.steps is not None:
            self.steps.wake()

    def _expect_transfer_report(self) -> None:
        if self.steps is not None and (transfers := self.scheduler.part(KVTransfer)) is not None:
            transfers.expect_report()
            self.steps.wake()

    def _executor_failed(self, error: Exception) -> None:
        self._executor_error = error
        if self.steps is not None:
            self.steps.fail(error)

    def _step_finished(self, plan: StepPlan, result: StepResult) -> None:
        try:
            self.metrics.observe_step(
                plan.total_tokens, result.device_seconds, result.launch_wait_seconds
            )
            if self.events.wants_steps:
                self.events.step_finished(plan, result)
            self._cache_hooks.emit_changes()
        except Exception:
            logger.exception("step %d could not be counted", plan.step)

    def _described(self, error: BaseException) -> str:
        """Describe an error, with the plugin that raised it."""
        failure = plugin_failure(self.plugins, error, "the scheduler")
        return str(failure) if failure is not None else f"{type(error).__name__}: {error}"

    def _die(self, error: BaseException) -> None:
        """Fail every request after a failed step, and accept no more."""
        reason = self._described(error)
        self.requests.dead_reason = reason
        self.requests.accepting = False
        logger.error("the engine died", exc_info=error)
        self.outputs.publish(self.scheduler.fail_all(f"the engine died: {reason}"))

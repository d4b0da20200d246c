"""The worker: runs steps and jobs on its own device, on the launch thread.

Its start is in `core/worker/start/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from ..config import EngineConfig
from ..errors import InvalidRequest, listed, shown
from ..live.worker_jobs import ApplyWeights, CallPart, ReleaseMemory, ReportMemory, StagingJob
from ..loading.model_config import ModelConfig
from ..nn.attention import Attention
from ..parallel.join import rank_device
from ..parallel.ranks import ONE_RANK, Ranks
from ..protocols.executors import ExecutorInfo
from ..registration.failing_plugin import plugin_failure
from ..registry import Plugins
from ..step import (
    NOTHING_IN_PROCESS,
    BalanceExperts,
    DropAdapter,
    InProcess,
    ModelFingerprint,
    PrepareAhead,
    ReadAdapter,
    Recover,
    StartProfile,
    StepPlan,
    StopProfile,
    WorkerJob,
)
from .expert_balance import ExpertMover
from .graphs.recorder import CudaRecorder, Recorder
from .kv_cache.layout import model_fingerprint
from .kv_cache.memory import explain_oom
from .kv_cache.scales import finding_scales
from .launched_step import LaunchedStep
from .mapped.driver import CudaAddresses
from .mapped.regions import MappedMemory
from .memory_release import MemoryRelease
from .nvtx_ranges import mark_modules
from .parts.adapters import Adapters
from .parts.part import WorkerPart
from .pooling_runner import PoolingRunner
from .profiler import WorkerProfiler
from .runner import ModelRunner
from .serving_process import collect_all
from .start.worker_start import StartedWorker, WorkerStart
from .threads import PendingStep
from .weight_updates import WeightUpdates

P = TypeVar("P", bound=WorkerPart)


class Worker:
    """Owner of one device."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        plugins: Plugins,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """`config`: with concrete `device` and `max_num_batched_tokens`. `ranks`: compute the model
        together, with the same plans and jobs in order.
        """
        self.config = config
        self.model_config = model_config
        self.plugins = plugins
        self.ranks = ranks.pausable()
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if config.device == "cuda" and ranks.size == 1
            else rank_device(config, ranks.local_rank)
        )
        self.runner: ModelRunner | PoolingRunner | None = None
        self.transfer_news: Callable[[], None] = _ignore
        """Called on any thread when KV transfers have a report."""
        self._started: StartedWorker | None = None
        self._experts: ExpertMover | None = None
        """Set with `enable_eplb`."""
        self._weights: WeightUpdates | None = None
        """None before the start."""
        self._unscaled: list[Attention] = []
        """Layers whose cache scales the first step computes."""
        self._reported_failures = 0
        """Failed recordings already reported."""
        stage = ranks.pipeline.size - 1 - ranks.pipeline.stage
        self._profiler = WorkerProfiler(
            self.device,
            stage * ranks.tensor.size + ranks.tensor.rank,
            nvtx=config.enable_layerwise_nvtx_tracing,
        )
        self._step_failed = False
        """Whether slots are undefined: see `step`."""

    def start(self) -> ExecutorInfo:
        start = WorkerStart(
            self.config, self.model_config, self.plugins, self.ranks, self.device,
            recorder=self._recorder,
            notify=lambda: self.transfer_news(),
            mapped=self._mapped(),
        )  # fmt: skip
        try:
            started = start.run()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise explain_oom(error, "starting the engine") from error
        except Exception as error:
            # Torch raises no distinct type of error for a CPU.
            if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
                raise explain_oom(error, "starting the engine") from error
            if (failure := plugin_failure(self.plugins, error, "the start")) is not None:
                raise failure from error
            raise
        self._started = started
        self.runner = started.runner
        if self.config.enable_layerwise_nvtx_tracing:
            nvtx = torch.cuda.nvtx
            mark_modules(started.runner.model, nvtx.range_push, nvtx.range_pop)
        self._unscaled = started.unscaled
        beside = [model for part in started.runner.parts for model in part.models]
        self._weights = WeightUpdates(
            self.config, self.model_config, self.plugins, self.ranks, self.device,
            started.runner.model, started.operations, started.tensors,
            MemoryRelease(
                started.tensors, _caches(started), self.device,
                has_addresses=started.graphs is not None, beside=[m.tensors for m in beside],
                mapped=started.mapped,
            ),
            beside,
        )  # fmt: skip
        if self.config.enable_eplb:
            with torch.inference_mode():
                self._experts = ExpertMover(started.runner.model, self.ranks.tensor, self.device)
        return started.info

    def _mapped(self) -> MappedMemory | None:
        """Return what weights and caches go into; None: torch's memory."""
        if self.device.type != "cuda" or not self.config.enable_sleep_mode:
            return None
        return MappedMemory(CudaAddresses(self.device))

    def _recorder(self) -> Recorder | None:
        """Return the device's recorder of steps, or None."""
        if self.device.type != "cuda" or self.config.enforce_eager:
            return None
        return CudaRecorder(self.device, self.ranks)

    def step(self, plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS) -> PendingStep:
        """Launch one step; none after a failure, until `recover`.

        Parts get their data either way, as it is sent once.
        """
        assert self.runner is not None, "start() comes first"
        if self._step_failed:
            self.runner.parts.receive(plan)
            raise RuntimeError("not run: a step before it failed")
        before = self._num_prepared()
        began, worked = time.perf_counter(), time.thread_time()
        try:
            with self._profiler.step_range(plan):
                step = self._launched(plan, in_process, self.runner)
            if isinstance(step, LaunchedStep):
                step.late_preparations = self._num_prepared() - before
                step.graph_recording_failures = self._new_recording_failures()
                worked = time.thread_time() - worked
                step.launch_wait_seconds = max(0.0, time.perf_counter() - began - worked)
        except BaseException as error:
            self._step_failed = True
            if (failure := plugin_failure(self.plugins, error, "a step")) is not None:
                raise failure from error
            raise
        return step

    def _num_prepared(self) -> int:
        """Kernels loaded and graphs recorded since the start."""
        started = self._started
        if started is None:
            return 0
        recorded = 0 if started.graphs is None else started.graphs.num_recorded
        return started.operations.num_loaded() + recorded

    def _new_recording_failures(self) -> int:
        """Failed recordings since the last call."""
        started = self._started
        if started is None or started.graphs is None:
            return 0
        before, self._reported_failures = self._reported_failures, started.graphs.num_failures
        return self._reported_failures - before

    def run_job(self, job: WorkerJob) -> Any:
        """Return the job's result, as its class says. Raises NotImplementedError for other jobs.
        `Recover` requires a failure on all ranks.
        """
        if isinstance(job, Recover):
            return self.recover()
        if isinstance(job, PrepareAhead):
            return self.prepare_ahead()
        if isinstance(job, ModelFingerprint):
            assert self.runner is not None, "start() comes first"
            return model_fingerprint(self.runner.model)
        if isinstance(job, ReadAdapter | DropAdapter):
            return self._adapter_job(job)
        if isinstance(job, CallPart):
            return self._call_part(job)
        if isinstance(job, StagingJob):
            return self._updates().stage(job)
        if isinstance(job, ApplyWeights):
            return self._apply_weights(job)
        if isinstance(job, ReleaseMemory):
            return self._release_memory(job)
        if isinstance(job, ReportMemory):
            return self._updates().memory.report()
        if isinstance(job, BalanceExperts) and self._experts is not None:
            return self._balance_experts(job, self._experts)
        if isinstance(job, StartProfile):
            return self._profiler.start(job)
        if isinstance(job, StopProfile):
            return self._profiler.stop()
        raise NotImplementedError(f"the worker does no {type(job).__name__}")

    def _adapter_job(self, job: ReadAdapter | DropAdapter) -> Any:
        """Return a future: it goes on on another thread."""
        assert self.runner is not None, "start() comes first"
        adapters = self.runner.parts.find(Adapters)
        if adapters is None:
            raise NotImplementedError("the worker serves no adapters (enable_lora)")
        return adapters.read(job) if isinstance(job, ReadAdapter) else adapters.drop(job)

    def _updates(self) -> WeightUpdates:
        assert self._weights is not None, "start() comes first"
        return self._weights

    @torch.inference_mode()
    def _call_part(self, job: CallPart) -> Future[Any]:
        """Return a future, as it may fail on some ranks alone."""
        assert self.runner is not None, "start() comes first"
        done: Future[Any] = Future()
        try:
            method = find_method(self.runner.parts, job.method)
            done.set_result(method(*job.args, **job.kwargs))
        except Exception as error:
            done.set_exception(plugin_failure(self.plugins, error, job.method) or error)
        return done

    @torch.inference_mode()
    def _release_memory(self, job: ReleaseMemory) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._updates().memory.release(job.owners, keep=job.keep)

    def _apply_weights(self, job: ApplyWeights) -> None:
        assert self.runner is not None, "start() comes first"
        self._updates().apply(job)
        for part in self.runner.parts:
            part.weights_changed()

    @torch.inference_mode()
    def recover(self) -> None:
        """Reset slots after a failed step. Raises the error of a lost device.

        Stages cannot recover: sent data may not have been received.
        """
        assert self.runner is not None, "start() comes first"
        if self.ranks.pipeline.size > 1:
            raise NotImplementedError("stages do not go on after a step that failed")
        if self.ranks.round is not None:
            raise NotImplementedError(
                "engines with common experts do not go on after a step that failed"
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.runner.forget_slots()
        self._step_failed = False

    def _launched(
        self, plan: StepPlan, in_process: InProcess, runner: ModelRunner | PoolingRunner
    ) -> PendingStep:
        try:
            plan = runner.parts.move(plan)
            if not plan.slots:
                return runner.write(plan, in_process)
            if self._unscaled:
                return self._first_step(plan, in_process, runner)
            return runner.launch(plan, in_process)
        except torch.OutOfMemoryError as error:
            raise explain_oom(error, f"running a step of {plan.total_tokens} tokens") from error

    @torch.inference_mode()
    def _first_step(
        self, plan: StepPlan, in_process: InProcess, runner: ModelRunner | PoolingRunner
    ) -> PendingStep:
        """Run the step that computes the cache's scales."""
        with finding_scales(self._unscaled, self.ranks):
            step = runner.launch(plan, in_process)
        self._unscaled = []
        if self._started is not None and self._started.graphs is not None:
            self._started.graphs.record_first(self.device)
        return step

    @torch.inference_mode()
    def prepare_ahead(self) -> bool:
        """Record graphs, compile short prompts and measure steps with drafts while idle; False if
        nothing is left."""
        runner = self.runner
        if self._started is None or not isinstance(runner, ModelRunner):
            return False
        if runner.decode.graphs is None:
            return False
        if self._started.graphs is not None and self._started.graphs.record_next():
            return True
        if self._started.warmup.run_short_prompt():
            return True
        return self._started.graphs is not None and self._started.graphs.measure_next()

    @torch.inference_mode()
    def _balance_experts(self, job: BalanceExperts, experts: ExpertMover) -> int:
        if job.moves:
            return experts.move()
        experts.forget()
        return 0

    def part(self, kind: type[P]) -> P | None:
        return None if self.runner is None else self.runner.parts.find(kind)

    def stop(self) -> None:
        if self._weights is not None:
            self._weights.close()
        if self.runner is not None:
            self.runner.parts.close()
        self.runner = self._started = self._experts = self._weights = None
        # Recorded steps, too, many of which are in cycles: NCCL's end waits for all that call it.
        collect_all()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def find_method(parts: Iterable[WorkerPart], name: str) -> Callable[..., Any]:
    """Return the method that a part offers under a name. Raises InvalidRequest."""
    own, _, method = name.rpartition(".")
    offered = [
        (part, each)
        for part in parts
        for each in part.methods
        if each == method and own in ("", part.name)
    ]
    if len(offered) == 1:
        bound: Callable[..., Any] = getattr(*offered[0])
        return bound
    names = sorted(f"{part.name}.{each}" for part in parts for each in part.methods)
    count = "several parts offer" if offered else "no part offers"
    raise InvalidRequest(
        f"method: {count} {shown(name)} (there are: {listed(names) or 'none'}); methods are those "
        "that parts of plugins list in WorkerPart.methods",
        param="method",
    )


def _caches(started: StartedWorker) -> Iterator[torch.Tensor]:
    """Yield what holds what requests have computed."""
    for tensors in started.caches:
        yield from tensors.values()
    for part in started.runner.parts:
        yield from part.caches()


def _ignore() -> None:
    """Do nothing: default before a listener is set."""

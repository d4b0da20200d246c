"""The worker: runs steps and jobs on its device, whose only owner it is. What happens once, before
the first step, is in `core/worker/start/`.

Every method runs on the launch thread.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..config import EngineConfig
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
    StepPlan,
    WorkerJob,
)
from .expert_balance import ExpertMover
from .graphs.recorder import CudaRecorder, Recorder
from .kv_cache.layout import model_fingerprint
from .kv_cache.memory import explain_oom
from .kv_cache.scales import finding_scales
from .launched_step import LaunchedStep
from .parts.adapters import Adapters
from .parts.part import WorkerPart
from .pooling_runner import PoolingRunner
from .runner import ModelRunner
from .start.worker_start import StartedWorker, WorkerStart
from .threads import PendingStep

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
        """`config` is resolved: `device` and `max_num_batched_tokens` are concrete. `ranks`: those
        that compute the model together; each gets the same plans and jobs, in the same order."""
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
        """Called, on any thread, when KV transfers have something to report."""
        self._started: StartedWorker | None = None
        self._experts: ExpertMover | None = None
        """Set with `enable_eplb`."""
        self._unscaled: list[Attention] = []
        """Layers whose cache scales the first step will compute."""
        self._reported_failures = 0
        """Failures to record a graph that a step's result has reported."""
        self._step_failed = False
        """Whether the state of the slots is undefined: see `step`."""

    def start(self) -> ExecutorInfo:
        """Load the model and make everything ready for the first step."""
        start = WorkerStart(
            self.config, self.model_config, self.plugins, self.ranks, self.device,
            recorder=self._recorder,
            notify=lambda: self.transfer_news(),
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
        self._unscaled = started.unscaled
        if self.config.enable_eplb:
            with torch.inference_mode():
                self._experts = ExpertMover(started.runner.model, self.ranks.tensor, self.device)
        return started.info

    def _recorder(self) -> Recorder | None:
        """Return how steps are recorded on this device; None: they are not recorded."""
        if self.device.type != "cuda" or self.config.enforce_eager:
            return None
        return CudaRecorder(self.device, self.ranks)

    def step(self, plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS) -> PendingStep:
        """Launch one step. None is launched after one that failed, until `recover`.

        Parts get what they were sent in both cases, since it is sent only once.
        """
        assert self.runner is not None, "start() comes first"
        if self._step_failed:
            self.runner.parts.receive(plan)
            raise RuntimeError("not run: a step before it failed")
        before = self._num_prepared()
        began, worked = time.perf_counter(), time.thread_time()
        try:
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
        """Number of kernels loaded and graphs recorded since the start."""
        started = self._started
        if started is None:
            return 0
        recorded = 0 if started.graphs is None else started.graphs.num_recorded
        return started.operations.num_loaded() + recorded

    def _new_recording_failures(self) -> int:
        """Number of graphs whose recording has failed since the last call, at first the start."""
        started = self._started
        if started is None or started.graphs is None:
            return 0
        before, self._reported_failures = self._reported_failures, started.graphs.num_failures
        return self._reported_failures - before

    def run_job(self, job: WorkerJob) -> Any:
        """Return what the job's class says. Raises NotImplementedError for one that is not done
        here. With several ranks, `Recover` is for a step that has failed on all of them."""
        if isinstance(job, Recover):
            return self.recover()
        if isinstance(job, PrepareAhead):
            return self.prepare_ahead()
        if isinstance(job, ModelFingerprint):
            assert self.runner is not None, "start() comes first"
            return model_fingerprint(self.runner.model)
        if isinstance(job, ReadAdapter | DropAdapter):
            return self._adapter_job(job)
        if isinstance(job, BalanceExperts) and self._experts is not None:
            return self._balance_experts(job, self._experts)
        raise NotImplementedError(f"the worker does no {type(job).__name__}")

    def _adapter_job(self, job: ReadAdapter | DropAdapter) -> Any:
        """Return a future: it goes on on another thread."""
        assert self.runner is not None, "start() comes first"
        adapters = self.runner.parts.find(Adapters)
        if adapters is None:
            raise NotImplementedError("the worker serves no adapters (enable_lora)")
        return adapters.read(job) if isinstance(job, ReadAdapter) else adapters.drop(job)

    @torch.inference_mode()
    def recover(self) -> None:
        """Reset every slot after a failed step. Raises the device's error if the device is lost.

        Stages cannot: one may have sent what another one, which failed, has not received.
        """
        assert self.runner is not None, "start() comes first"
        if self.ranks.pipeline.size > 1:
            raise NotImplementedError("stages do not go on after a step that failed")
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
        """Run the step that computes the scales of the cache. Nothing has been cached before it."""
        with finding_scales(self._unscaled, self.ranks):
            step = runner.launch(plan, in_process)
        self._unscaled = []
        if self._started is not None and self._started.graphs is not None:
            self._started.graphs.record_first(self.device)
        return step

    @torch.inference_mode()
    def prepare_ahead(self) -> bool:
        """Prepare for later steps while idle: compile for short prompts, record graphs. Returns
        False if nothing is left."""
        runner = self.runner
        if self._started is None or not isinstance(runner, ModelRunner):
            return False
        if runner.decode.graphs is None:
            return False
        if self._started.graphs is not None and self._started.graphs.record_next():
            return True
        return self._started.warmup.run_short_prompt()

    @torch.inference_mode()
    def _balance_experts(self, job: BalanceExperts, experts: ExpertMover) -> int:
        if job.moves:
            return experts.move()
        experts.forget()
        return 0

    def part(self, kind: type[P]) -> P | None:
        """Return the part of a class; None: there is none."""
        return None if self.runner is None else self.runner.parts.find(kind)

    def stop(self) -> None:
        """Release the device memory."""
        if self.runner is not None:
            self.runner.parts.close()
        self.runner = self._started = self._experts = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _ignore() -> None:
    """Do nothing: default before a listener is set."""

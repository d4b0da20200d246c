"""The in-process worker: builds the model, sizes the cache, runs steps. It is the only owner of the
device.

Every method runs on the launch thread.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from ..cache.groups import CacheGroup, TokenCache, form_groups
from ..config import EngineConfig
from ..errors import ConfigError
from ..loading.build import build_model
from ..loading.model_config import ModelConfig
from ..nn.attention import Attention
from ..nn.operations import Operations
from ..parallel.join import rank_device
from ..parallel.ranks import ONE_RANK, Ranks
from ..protocols.attention import AttentionBackend, AttentionSpec
from ..protocols.executors import ExecutorInfo
from ..protocols.kv import KVCodec, KVConnectorSetup, KVLayout
from ..protocols.kv_compressors import KVCompressor
from ..protocols.logits_processors import LogitsProcessorSetup
from ..registration.choice import choose
from ..registration.failing_plugin import failing_plugin, plugin_failure
from ..registry import Plugins
from ..step import (
    NOTHING_IN_PROCESS,
    InProcess,
    ModelFingerprint,
    PrepareAhead,
    Recover,
    StepPlan,
    WorkerJob,
)
from .batch import STEPS_IN_FLIGHT, PersistentBatch
from .graphs import CudaRecorder, DecodeGraphs, Ending, Recorder
from .guarded_half import EmptyStep, GuardedHalf, TransferringStep
from .kv_cache.compaction import Compactor, load_compressor
from .kv_cache.layout import kv_layout, model_fingerprint
from .kv_cache.memory import allocate_cache, bytes_per_block, explain_oom, num_kv_blocks
from .kv_cache.query_ring import QueryRing
from .kv_cache.scales import finding_scales, to_be_scaled, unscaled
from .kv_cache.states import NoAttention, make_states
from .launched_step import LaunchedStep
from .mixed_graphs import MixedGraphs
from .pooling_runner import PoolingRunner
from .runner import ModelRunner
from .sampling.masks import grammar_masks
from .sampling.processors import Processors
from .sampling.sampler import Sampler
from .sampling.sampling_state import SamplingState
from .selection import attention_refusal
from .threads import PendingStep
from .warmup import StepGraphs, Warmup

logger = logging.getLogger("jackfield.worker")

KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


COMPACTED_INPUTS = frozenset({"decode_inputs.dropped", "step_inputs.dropped"})
"""Options of `Operations` that rows with compacted caches need."""
NO_ATTENTION: tuple[str, type[AttentionBackend], str] = (
    NoAttention.name,
    NoAttention,
    "no layer attends",
)
"""The backend of a model whose layers only keep states: name, class, reason."""
FIRST_PROMPT = 128
"""Tokens of the prompt whose step is recorded before all others."""
MIXED_TOGETHER = 2
"""Mixed-step items recorded per decode step: there are more of them."""
RECORDING_SECONDS = 1.7
"""Spent on recording more before the engine is ready; the rest is recorded in spare time."""


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
        assert config.max_num_batched_tokens is not None
        self.config = config
        self.model_config = model_config
        self.plugins = plugins
        self.ranks = ranks.pausable()
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if config.device == "cuda" and ranks.tensor.size == 1
            else rank_device(config, ranks.local_rank)
        )
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.runner: ModelRunner | PoolingRunner | None = None
        self.connector: GuardedHalf | None = None
        self.transfer_news: Callable[[], None] = _nobody
        """Called, on any thread, when the connector has something to report."""
        self._trials: Warmup | None = None
        self._operations = Operations()
        self._graphs: StepGraphs | None = None
        self._keeps_states = False
        """Whether layers keep states of sequences."""
        self._unscaled: list[Attention] = []
        """Layers whose cache scales the first step will compute."""
        self._step_failed = False
        """Whether the state of the slots is undefined: see `step`."""
        self._graphs_later: StepGraphs | None = None
        """Graphs to use once the cache scales are known."""

    def start(self) -> ExecutorInfo:
        """Load the model and make everything ready for the first step."""
        try:
            return self._start()
        except torch.OutOfMemoryError as error:
            raise explain_oom(error, "starting the engine") from error
        except Exception as error:
            # Torch raises no distinct type of error for a CPU.
            if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
                raise explain_oom(error, "starting the engine") from error
            if (failure := plugin_failure(self.plugins, error, "the start")) is not None:
                raise failure from error
            raise

    @torch.inference_mode()
    def _start(self) -> ExecutorInfo:
        config, model_config, device = self.config, self.model_config, self.device
        began = time.monotonic()
        if device.type == "cpu" or self.ranks.tensor.size > 1:
            _leave_a_core_for_the_loop(self.ranks.tensor.size)
        held_before = _allocated(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.reset_peak_memory_stats(device)
        name, operations_class, _ = choose(
            self.plugins["operations"],
            "operations",
            config.operations,
            lambda candidate: candidate.supports(device, model_config.dtype),
        )
        with self.plugins["operations"].calling(name, "its constructor"):
            operations = self._operations = operations_class()
        model = build_model(self.plugins, config, model_config, device, operations, self.ranks)
        if device.type == "cuda":
            # Memory needed only during loading (rounding, repacking) does not count for a step.
            torch.cuda.reset_peak_memory_stats(device)
        weight_bytes = sum(p.nbytes for p in model.parameters())
        if model_config.pooling is not None and not model_config.pooling.causal:
            return self._start_encoder(model, operations, weight_bytes, began)
        layers = [m for m in model.modules() if isinstance(m, Attention)]
        states = make_states(model, config, device)
        self._keeps_states = states is not None
        state_bytes = 0 if states is None else states.nbytes
        kv_name = config.kv_cache_dtype
        if kv_name == "auto":
            kv_name = getattr(model, "kv_cache_dtype", None) or kv_name
        kv_dtype = KV_DTYPES.get(kv_name, model_config.dtype)
        fp8_cache = kv_dtype.itemsize == 1
        if kv_dtype != model_config.dtype and not fp8_cache:
            raise ConfigError(
                f"kv_cache_dtype: {config.kv_cache_dtype} differs from the model's "
                f"{model_config.dtype}, which is not supported",
                param="kv_cache_dtype",
            )
        for layer in layers if fp8_cache else ():
            key_scale, value_scale = layer.cache_scales
            layer.spec = msgspec.structs.replace(
                layer.spec, key_scale=key_scale, value_scale=value_scale
            )
        self._unscaled = unscaled(layers, config, fp8_cache)
        specs = [
            to_be_scaled(layer.spec) if layer in self._unscaled else layer.spec for layer in layers
        ]
        compressor = load_compressor(self.plugins, config, layers, kv_dtype)
        compacts = compressor is not None
        if compacts and (lacking := COMPACTED_INPUTS - operations.features):
            raise ConfigError(
                f"kv_compression: operations {name!r} do not support {', '.join(sorted(lacking))}",
                param="kv_compression",
            )
        name, backend_class, reason = NO_ATTENTION
        if layers:
            name, backend_class, reason = choose(
                self.plugins["attention_backend"],
                "attention_backend",
                config.attention_backend,
                lambda candidate: _refusal(
                    candidate, specs, device, model_config.dtype, fp8_cache, compacts
                ),
            )
        max_model_len = model_config.max_model_len
        groups = self._form_groups(layers, kv_dtype, backend_class)
        with self.plugins["attention_backend"].calling(name, "its constructor"):
            backend = backend_class(
                device=device,
                dtype=model_config.dtype,
                block_size=config.block_size,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=max_model_len,
            )
        batch = PersistentBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=config.block_size,
            device=device,
            operations=operations,
            num_groups=len(groups),
            compacts=compacts,
        )
        if model_config.pooling is not None:
            self.runner = PoolingRunner(
                model=model,
                pooling=model_config.pooling,
                backend=backend,
                batch=batch,
                device=device,
            )
        else:
            sampling = SamplingState(
                config.max_num_seqs + 1, model_config.vocab_size, device, batch.table.token_history,
                kernels=operations.samples,
            )  # fmt: skip
            self.runner = ModelRunner(
                model=model,
                backend=backend,
                batch=batch,
                sampling=sampling,
                sampler=Sampler(sampling, self._processors(batch), operations),
                vocab_size=model_config.vocab_size,
                device=device,
                masks=grammar_masks(self.ranks.tensor, config, model_config.vocab_size, device),
                ranks=self.ranks,
            )
            self.runner.states = states
            if compressor is not None:
                self._compress(self.runner, compressor, layers, operations)
        graphs = self._graphs = self._step_graphs(operations)
        trials = self._trials = self._trial_steps(self.runner)
        self._bind_cache(layers, groups, 2, kv_dtype)
        with self.ranks.pause():
            # How much there is to compile depends on this host's files.
            trials.precompile(operations, graphs)
        cache_specs = [layer.cache_spec(kv_dtype) for layer in layers]
        block_bytes = bytes_per_block(cache_specs, groups, config.block_size)
        available = self._available(held_before, trials, state_bytes)
        num_blocks = num_kv_blocks(
            config,
            available=self.ranks.minimum(available, device),
            block_bytes=block_bytes,
            block_size=config.block_size,
            max_model_len=max_model_len,
            groups=groups,
            max_chunk=self.max_num_batched_tokens,
        )
        caches = self._bind_cache(layers, groups, num_blocks, kv_dtype)
        trials.warm_up()
        if isinstance(self.runner, ModelRunner) and self.runner.compactor is not None:
            self.runner.compactor.warm_up()
        if graphs is not None:
            assert isinstance(self.runner, ModelRunner)
            if self._unscaled:
                self._graphs_later = graphs
            else:
                self._use(graphs, self.runner)
        return ExecutorInfo(
            num_blocks=num_blocks,
            device=str(device),
            dtype=str(model_config.dtype).removeprefix("torch."),
            attention_backend=name,
            attention_reason=reason,
            weight_bytes=weight_bytes,
            kv_cache_bytes=num_blocks * block_bytes + state_bytes,
            load_seconds=time.monotonic() - began,
            steps_in_flight=STEPS_IN_FLIGHT,
            kv_layout=self._connect(model, cache_specs, caches),
            cache_groups=groups,
            kv_compression=compacts,
            keeps_states=states is not None,
            num_snapshots=0 if states is None else states.num_snapshots,
        )

    def _compress(
        self,
        runner: ModelRunner,
        compressor: KVCompressor,
        layers: Sequence[Attention],
        operations: Operations,
    ) -> None:
        """Let plans compact caches, and keep the queries that the compressor needs."""
        config, ring = self.config, None
        described = self.plugins["kv_compressor"].described(config.kv_compression or "")
        if compressor.num_queries:
            ring = QueryRing(
                layers, config.max_num_seqs, compressor.num_queries, self.device,
                self.model_config.dtype,
            )  # fmt: skip
            runner.query_ring = ring
            runner.parts = (*runner.parts, ring)
        runner.compactor = Compactor(
            compressor, described, layers, runner.batch.table, config.block_size, operations, ring
        )

    def _processors(self, batch: PersistentBatch) -> Processors:
        setup = LogitsProcessorSetup(
            vocab_size=self.model_config.vocab_size,
            num_slots=self.config.max_num_seqs,
            max_model_len=self.model_config.max_model_len,
            device=self.device,
            history=batch.table.token_history,
        )
        return Processors.load(self.plugins, self.config, setup)

    def _use(self, graphs: StepGraphs, runner: ModelRunner) -> None:
        """Record what the first requests need, and then more for up to `RECORDING_SECONDS`."""
        try:
            graphs.decode.record(1, Ending.PLAIN)
            runner.graphs = graphs.decode
            if graphs.mixed is not None:
                graphs.mixed.record_for(FIRST_PROMPT)
                runner.mixed_graphs = graphs.mixed
            end = time.monotonic() + RECORDING_SECONDS
            while self.ranks.all(time.monotonic() < end, self.device):
                if not self._record_next(graphs):
                    break
        except runner.record_errors:
            logger.exception("steps cannot be recorded here; going on without graphs")

    def _record_next(self, graphs: StepGraphs) -> bool:
        """Record one more of each kind of step; False: nothing was missing."""
        missing = graphs.decode.missing()
        if missing:
            graphs.decode.record(*missing[0])
        more = False
        for _ in range(MIXED_TOGETHER):
            more = graphs.mixed is not None and graphs.mixed.record_next()
        return more or len(missing) > 1

    def _start_encoder(
        self, model: nn.Module, operations: Operations, weight_bytes: int, began: float
    ) -> ExecutorInfo:
        """Complete the start of a model without a KV cache."""
        config, pooling = self.config, self.model_config.pooling
        assert pooling is not None
        unscaled((), config, fp8_cache=False)
        self.runner = PoolingRunner(
            model=model,
            pooling=pooling,
            backend=None,
            batch=PersistentBatch(
                max_num_seqs=config.max_num_seqs,
                max_model_len=self.model_config.max_model_len,
                block_size=config.block_size,
                device=self.device,
                operations=operations,
            ),
            device=self.device,
        )
        trials = self._trial_steps(self.runner)
        with self.ranks.pause():
            trials.precompile(operations)
        if self.device.type == "cuda":
            # Run the largest possible step: memory that does not suffice fails the start, not a
            # request.
            trials.run_largest()
        trials.warm_up()
        return ExecutorInfo(
            num_blocks=0,
            device=str(self.device),
            dtype=str(self.model_config.dtype).removeprefix("torch."),
            attention_backend="encoder",
            attention_reason="whole prompts, no KV cache",
            weight_bytes=weight_bytes,
            kv_cache_bytes=0,
            load_seconds=time.monotonic() - began,
            steps_in_flight=STEPS_IN_FLIGHT,
        )

    def step(self, plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS) -> PendingStep:
        """Launch one step. None is launched after one that failed, until `recover`.

        A KV connector's worker half gets the plan's metadata in both cases, since it is sent only
        once.
        """
        assert self.runner is not None, "start() comes first"
        connector = self.connector
        if connector is not None:
            connector.start(plan.kv_metadata)
        if self._step_failed:
            raise RuntimeError("not run: a step before it failed")
        before = self._num_prepared()
        began, worked = time.perf_counter(), time.thread_time()
        try:
            step = self._launched(plan, in_process, self.runner)
            if isinstance(step, LaunchedStep):
                step.late_preparations = self._num_prepared() - before
                worked = time.thread_time() - worked
                step.launch_wait_seconds = max(0.0, time.perf_counter() - began - worked)
        except BaseException as error:
            self._step_failed = True
            if (failure := plugin_failure(self.plugins, error, "a step")) is not None:
                raise failure from error
            raise
        if connector is None:
            return step
        connector.poll()
        return TransferringStep(step, connector)

    def _num_prepared(self) -> int:
        """Number of kernels loaded and graphs recorded since the start."""
        graphs = self._graphs
        recorded = 0
        if graphs is not None:
            recorded = graphs.decode.num_recorded
            if graphs.mixed is not None:
                recorded += graphs.mixed.num_recorded
        return self._operations.num_loaded() + recorded

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
        raise NotImplementedError(f"the worker does no {type(job).__name__}")

    @torch.inference_mode()
    def recover(self) -> None:
        """Reset every slot after a failed step. Raises the device's error if the device is lost."""
        assert self.runner is not None, "start() comes first"
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.runner.forget_slots()
        self._step_failed = False

    def _launched(
        self, plan: StepPlan, in_process: InProcess, runner: ModelRunner | PoolingRunner
    ) -> PendingStep:
        try:
            if self._unscaled and plan.slots:
                return self._first_step(plan, in_process, runner)
            if not plan.slots:
                return self._without_rows(plan, in_process, runner)
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
        if self._graphs_later is not None and isinstance(runner, ModelRunner):
            self._use(self._graphs_later, runner)
            self._graphs_later = None
        return step

    @torch.inference_mode()
    def _without_rows(
        self, plan: StepPlan, in_process: InProcess, runner: ModelRunner | PoolingRunner
    ) -> EmptyStep:
        """Apply a plan that computes nothing: it changes slots, or is for the KV connector."""
        runner.update_slots(plan, in_process)
        runner.batch.write(plan)
        return EmptyStep(plan)

    def _connect(
        self,
        model: nn.Module,
        specs: Sequence[TokenCache],
        caches: Sequence[Mapping[str, torch.Tensor]],
    ) -> KVLayout | None:
        """Create the worker half of the KV connector, if one is configured.

        specs, caches: [num_layers], of the one group that connectors support.
        """
        transfer = self.config.kv_transfer_config
        if transfer is None:
            return None
        parts = [part for cache in caches for part in cache.values()]
        layout = kv_layout(
            self.config, self.model_config, model, specs, parts[0].shape[1], self.ranks
        )
        setup = KVConnectorSetup(
            transfer=transfer,
            layout=layout,
            plugins=self.plugins,
            notify=lambda: self.transfer_news(),
        )
        connectors = self.plugins["kv_connector"]
        name = transfer.kv_connector
        connector = connectors.load(name)

        def who(error: BaseException) -> str:
            # The connector may consist of others (`multi`).
            return failing_plugin(self.plugins, error) or connectors.described(name)

        with connectors.calling(name, "its metadata_type"):
            codec = KVCodec(connector)
        with connectors.calling(name, "make_worker"):
            half = connector.make_worker(setup)
        self.connector = GuardedHalf(half, codec, self.device, who, setup.notify)
        with connectors.calling(name, "bind"):
            self.connector.bind(parts)
        return layout

    @torch.inference_mode()
    def prepare_ahead(self) -> bool:
        """Prepare for later steps while idle: compile for short prompts, record graphs. Returns
        False if nothing is left."""
        runner = self.runner
        if not isinstance(runner, ModelRunner) or runner.graphs is None:
            return False
        if self._record_next(StepGraphs(runner.graphs, runner.mixed_graphs)):
            return True
        return self._trials is not None and self._trials.run_short_prompt()

    def _step_graphs(self, operations: Operations) -> StepGraphs | None:
        """Create the recorders of steps, with nothing recorded yet; None: steps are not
        recorded."""
        runner = self.runner
        if not isinstance(runner, ModelRunner) or not runner.backend.graph_safe:
            return None
        if (recorder := self._recorder()) is None:
            return None
        decode = DecodeGraphs(
            forward=runner.forward,
            logits=runner.logits,
            batch=runner.batch,
            sampler=runner.sampler,
            operations=operations,
            record=recorder,
        )
        mixed = None
        if runner.backend.mixed_graph_safe and (operations.mixed_states or not self._keeps_states):
            mixed = MixedGraphs(
                forward=runner.forward,
                logits=runner.logits,
                batch=runner.batch,
                backend=runner.backend,
                sampler=runner.sampler,
                record=recorder,
                max_tokens=self.max_num_batched_tokens,
            )
        return StepGraphs(decode, mixed)

    def _recorder(self) -> Recorder | None:
        """Return how decode steps are recorded on this device; None: they are not recorded."""
        if self.device.type != "cuda" or self.config.enforce_eager:
            return None
        return CudaRecorder(self.device, self.ranks)

    def stop(self) -> None:
        """Release the device memory."""
        if self.connector is not None:
            self.connector.close()
            self.connector = None
        self.runner = self._trials = self._graphs = self._graphs_later = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _form_groups(
        self,
        layers: Sequence[Attention],
        dtype: torch.dtype,
        backend_class: type[AttentionBackend],
    ) -> tuple[CacheGroup, ...]:
        """Return the groups of layers that share a block table: one for all layers if a backend or
        a KV connector supports no other grouping."""
        groups = form_groups(
            [layer.cache_spec(dtype) for layer in layers],
            max_model_len=self.model_config.max_model_len,
            block_size=self.config.block_size,
        )
        if any(group.window is not None for group in groups):
            reason = None
            if not backend_class.cache_groups:
                reason = f"attention backend {backend_class.name} reads them"
            if self.config.kv_transfer_config is not None:
                reason = f"KV connector {self.config.kv_transfer_config.kv_connector} moves them"
            if reason is not None:
                logger.info("blocks behind sliding windows stay in the cache: %s", reason)
                return (CacheGroup(tuple(range(len(layers)))),)
        return groups

    def _bind_cache(
        self,
        layers: Sequence[Attention],
        groups: Sequence[CacheGroup],
        num_blocks: int,
        dtype: torch.dtype,
    ) -> list[dict[str, torch.Tensor]]:
        """Allocate the cache. Layers at the same index of different groups share memory, but no
        blocks. Return the parts at each index."""
        shared: list[dict[str, torch.Tensor]] = []
        for number, group in enumerate(groups):
            for place, layer in enumerate(layers[index] for index in group.layers):
                if place == len(shared):
                    spec, size = layer.cache_spec(dtype), self.config.block_size
                    shared.append(allocate_cache(spec, num_blocks, size, self.device))
                layer.group = number
                layer.bind(shared[place])
        return shared

    def _trial_steps(self, runner: ModelRunner | PoolingRunner) -> Warmup:
        return Warmup(runner, self.config, self.model_config.max_model_len, self.device)

    def _available(self, held_before: int, trials: Warmup, state_bytes: int) -> int:
        """Bytes left for blocks, after one step at full budget has been measured. state_bytes: of
        states, which are allocated already."""
        if self.device.type == "cpu":
            return max(0, int(self.config.cpu_kvcache_space * (1 << 30)) - state_bytes)
        if self.config.num_gpu_blocks_override is not None:
            return 0
        resting = torch.cuda.memory_allocated(self.device)
        trials.run_largest()
        torch.cuda.synchronize(self.device)
        largest = torch.cuda.max_memory_allocated(self.device)
        peak = largest - held_before
        if not self.config.enforce_eager:
            # Graphs need as much memory of their own as the largest step.
            peak += largest - resting
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_allocated(self.device) - held_before
        budget = int(total * self.config.gpu_memory_utilization) - peak
        return max(0, min(budget, free - (peak - held)))


def _nobody() -> None:
    """Do nothing: default before a listener is set."""


def _refusal(
    backend: type[AttentionBackend],
    specs: list[AttentionSpec],
    device: torch.device,
    dtype: torch.dtype,
    fp8_cache: bool,
    compacts: bool,
) -> str | None:
    if compacts and not (backend.compacted_cache and backend.standard_cache):
        return "it reads no compacted cache (kv_compression)"
    if fp8_cache and not backend.fp8_cache:
        return "it reads no fp8 cache (kv_cache_dtype)"
    reasons = (attention_refusal(backend, spec, device, dtype) for spec in specs)
    return next((reason for reason in reasons if reason is not None), None)


def _leave_a_core_for_the_loop(num_ranks: int) -> None:
    """Leave a core to the event loop: torch's CPU threads wait busily, so one per core would starve
    it. `num_ranks`: those that share the cores.

    The setting belongs to the calling (launch) thread; OMP_NUM_THREADS overrules it.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, ((os.cpu_count() or 2) - 1) // num_ranks))


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

"""Starts a worker: loads the model, chooses what serves it, sizes the cache, and warms up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ...cache.groups import CacheGroup
from ...config import EngineConfig
from ...errors import ConfigError
from ...loading.build import build_model
from ...loading.model_config import ModelConfig
from ...nn.attention import Attention
from ...nn.operations import Operations
from ...nn.rotary import Rotary
from ...parallel.ranks import Ranks
from ...protocols.attention import AttentionBackend, LayerSpec, PagedBackend
from ...protocols.executors import ExecutorInfo
from ...protocols.kv_compressors import KVCompressor
from ...protocols.logits_processors import LogitsProcessorSetup
from ...registration.choice import choose
from ...registry import Plugins
from ..batch import STEPS_IN_FLIGHT, PersistentBatch
from ..graphs.recorder import Recorder
from ..graphs.step_graphs import StepGraphs
from ..guarded_half import GuardedHalf
from ..kv_cache.allocation import (
    bind_cache,
    form_cache_groups,
)
from ..kv_cache.compaction import Compactor, load_compressor
from ..kv_cache.formats import QUANTIZED_WRITES, choose_formats
from ..kv_cache.layout import kv_layout
from ..kv_cache.memory import CacheDemand, bytes_per_block, num_kv_blocks
from ..kv_cache.planned_compactions import PlannedCompactions
from ..kv_cache.query_ring import QueryRing
from ..kv_cache.scales import to_be_scaled, unscaled
from ..kv_cache.sources import Sources, bind_sources, source_layers
from ..kv_cache.states import States, make_states
from ..pipeline_stage import PipelineStage
from ..pooling_runner import PoolingRunner
from ..runner import ModelRunner
from ..sampling.masks import grammar_masks
from ..sampling.processors import Processors
from ..sampling.sampler import Sampler
from ..sampling.sampling_state import SamplingState
from ..selection import backend_kind, cache_layers, keys_and_values
from ..speculation.load import load_drafting
from .attention import choose_attention
from .cache_room import CacheRoom
from .connector import connect_half
from .stages import AllStages, StageFacts
from .warmup import Warmup

COMPACTED_INPUTS = frozenset({"decode_inputs.dropped", "step_inputs.dropped"})
"""Options of `Operations` that rows with compacted caches need."""


@dataclass
class StartedWorker:
    """What steps need."""

    info: ExecutorInfo
    runner: ModelRunner | PoolingRunner
    operations: Operations
    warmup: Warmup
    graphs: StepGraphs | None = None
    """None: steps are not recorded."""
    unscaled: list[Attention] = field(default_factory=list)
    """Layers whose cache scales the first step will compute; steps are recorded after it."""
    connector: GuardedHalf | None = None


class WorkerStart:
    """One start of a worker, on the launch thread."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        plugins: Plugins,
        ranks: Ranks,
        device: torch.device,
        recorder: Callable[[], Recorder | None],
        notify: Callable[[], None],
    ) -> None:
        """`config` is resolved. recorder: makes what records steps; None: they are not recorded.
        notify: the KV connector has something to report; called from any thread."""
        assert config.max_num_batched_tokens is not None
        self.config = config
        self.model_config = model_config
        self.plugins = plugins
        self.ranks = ranks
        self.device = device
        self._max_num_batched_tokens: int = config.max_num_batched_tokens
        self._recorder = recorder
        self._notify = notify
        self._began = time.monotonic()

    @torch.inference_mode()
    def run(self) -> StartedWorker:
        """Load the model and make everything ready for the first step."""
        device, model_config = self.device, self.model_config
        if self.ranks.pipeline.size > 1 and model_config.pooling is not None:
            raise ConfigError(
                "pipeline_parallel_size: models whose states are pooled run in one stage",
                param="pipeline_parallel_size",
            )
        if device.type == "cpu" or self.ranks.size > 1:
            _leave_a_core_for_the_loop(self.ranks.size)
        room = CacheRoom(self.config, self.ranks, device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.reset_peak_memory_stats(device)
        name, operations_class, _ = choose(
            self.plugins["operations"],
            "operations",
            self.config.operations,
            lambda candidate: candidate.supports(device, model_config.dtype),
        )
        with self.plugins["operations"].calling(name, "its constructor"):
            operations = operations_class()
        model = build_model(self.plugins, self.config, model_config, device, operations, self.ranks)
        if device.type == "cuda":
            # Memory needed only during loading (rounding, repacking) does not count for a step.
            torch.cuda.reset_peak_memory_stats(device)
        if model_config.pooling is not None and not model_config.pooling.causal:
            return self._start_encoder(model, operations)
        return self._start_decoder(model, operations, name, room)

    def _start_encoder(self, model: nn.Module, operations: Operations) -> StartedWorker:
        """Complete the start of a model without a KV cache."""
        unscaled((), self.config, fp8_cache=False)
        batch = self._batch(operations, self.model_config.max_model_len)
        runner = self._pooling_runner(model, None, batch)
        warmup = self._warmup(runner)
        with self.ranks.pause():
            warmup.precompile(operations)
        if self.device.type == "cuda":
            # Run the largest possible step: memory that does not suffice fails the start, not a
            # request.
            warmup.run_largest()
        warmup.warm_up()
        info = ExecutorInfo(
            num_blocks=0,
            device=str(self.device),
            dtype=str(self.model_config.dtype).removeprefix("torch."),
            attention_backend="encoder",
            attention_reason="whole prompts, no KV cache",
            weight_bytes=_weight_bytes(model),
            kv_cache_bytes=0,
            load_seconds=time.monotonic() - self._began,
            steps_in_flight=STEPS_IN_FLIGHT,
        )
        return StartedWorker(info, runner, operations, warmup)

    def _start_decoder(
        self, model: nn.Module, operations: Operations, operations_name: str, room: CacheRoom
    ) -> StartedWorker:
        """Complete the start of a model whose layers cache what they have computed."""
        config, device = self.config, self.device
        weight_bytes = _weight_bytes(model)
        layers = cache_layers(model)
        with_keys = keys_and_values(layers, config)
        states = make_states(model, config, device, self.ranks)
        wish = getattr(model, "kv_cache_dtype", None) if with_keys else None
        formats = choose_formats(with_keys, config, wish, self.model_config.dtype)
        kv_dtype = formats.dtype
        if formats.quantized and (lacking := QUANTIZED_WRITES - operations.features):
            raise ConfigError(
                f"kv_cache_dtype: operations {operations_name!r} do not support "
                f"{', '.join(sorted(lacking))}",
                param="kv_cache_dtype",
            )
        first_scaled = unscaled(formats.fp8_layers, config, formats.fp8_cache)
        compressor = load_compressor(self.plugins, config, with_keys, kv_dtype)
        compacts = compressor is not None
        if compacts and (lacking := COMPACTED_INPUTS - operations.features):
            raise ConfigError(
                f"kv_compression: operations {operations_name!r} do not support "
                f"{', '.join(sorted(lacking))}",
                param="kv_compression",
            )
        specs: list[LayerSpec] = [
            to_be_scaled(layer.spec)
            if isinstance(layer, Attention) and layer in first_scaled
            else layer.spec
            for layer in layers
        ]
        sources = source_layers(model, layers, kv_dtype)
        speculative = config.speculative_config
        num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
        if num_drafts and sources:
            raise ConfigError(
                "speculative_config: drafts of encoder-decoder models are not verified yet",
                param="speculative_config",
            )
        chosen = choose_attention(
            self.plugins,
            config,
            backend_kind(layers),
            [*specs, *(layer.spec for layer in sources)],
            device,
            self.model_config.dtype,
            formats=formats,
            compacts=compacts,
            drafts=num_drafts > 0,
        )
        max_model_len = self.model_config.max_model_len
        cache_specs = [layer.cache_spec(kv_dtype) for layer in layers]
        facts = StageFacts(
            specs=tuple(cache_specs),
            num_snapshots=None if states is None else states.num_snapshots,
            cache_groups=chosen.backend_class.cache_groups,
        )
        stages = AllStages(self.ranks.pipeline, facts, device)
        refusal = None if stages.cache_groups else f"attention backend {chosen.name} reads them"
        all_groups = form_cache_groups(stages.specs, refusal, config, max_model_len)
        groups = stages.own(all_groups)
        state_bytes = 0 if states is None else states.nbytes
        demand = CacheDemand(
            # A source, of at most the same length, has a table like one more group's.
            groups=(*all_groups, CacheGroup()) if sources else all_groups,
            block_bytes=bytes_per_block(cache_specs, groups, config.block_size),
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_chunk=self._max_num_batched_tokens,
        )
        length = room.length_of_tables(demand, state_bytes)
        for module in model.modules():
            if isinstance(module, Rotary):
                module.fill(length)
        with self.plugins[chosen.kind].calling(chosen.name, "its constructor"):
            backend = chosen.backend_class(
                device=device,
                dtype=self.model_config.dtype,
                block_size=config.block_size,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=self._max_num_batched_tokens,
                max_model_len=length,
            )
            source_backend = None
            if sources:
                # Its rows are all tokens of a step.
                source_backend = chosen.backend_class(
                    device=device,
                    dtype=self.model_config.dtype,
                    block_size=config.block_size,
                    max_num_seqs=self._max_num_batched_tokens,
                    max_num_batched_tokens=self._max_num_batched_tokens,
                    max_model_len=length,
                )
        batch = self._batch(
            operations, length, num_groups=len(groups), compacts=compacts,
            has_sources=bool(sources), num_drafts=num_drafts,
        )  # fmt: skip
        runner: ModelRunner | PoolingRunner
        if self.model_config.pooling is not None:
            runner = self._pooling_runner(model, backend, batch)
        else:
            runner = self._model_runner(model, backend, batch, states)
            if self.ranks.pipeline.size > 1:
                runner.divide_by_layers(self._stage(model, batch))
            if isinstance(source_backend, AttentionBackend):
                runner.sources = Sources(model, source_backend, batch)
            if compressor is not None:
                self._compress(runner, compressor, with_keys, operations)
        graphs = self._graphs(runner)
        warmup = self._warmup(runner)
        bind_sources(sources, bind_cache(layers, groups, 2, config.block_size, kv_dtype, device))
        with self.ranks.pause():
            # How much there is to compile depends on this host's files.
            warmup.precompile(operations, graphs)
        num_blocks = num_kv_blocks(config, demand, room.available(warmup, state_bytes))
        num_blocks = self.ranks.minimum_of_stages(num_blocks, device)
        fitting = None
        if config.max_model_len == "auto":
            fitting = min(length, demand.longest_of(num_blocks))
        caches = bind_cache(layers, groups, num_blocks, config.block_size, kv_dtype, device)
        bind_sources(sources, caches)
        warmup.warm_up()
        if isinstance(runner, ModelRunner) and runner.compactions is not None:
            runner.compactions.warm_up()
        if isinstance(runner, ModelRunner) and runner.drafting is not None:
            runner.drafting.warm_up()
        if graphs is not None and not first_scaled:
            graphs.record_first(device)
        load_seconds = time.monotonic() - self._began
        layout, connector = None, None
        if config.kv_transfer_config is not None:
            layout = kv_layout(
                config, self.model_config, model, cache_specs, num_blocks, device, self.ranks
            )
            connector = connect_half(
                config.kv_transfer_config,
                self.plugins,
                layout,
                caches,
                device,
                self._notify,
                compacts=compacts,
            )
        info = ExecutorInfo(
            num_blocks=num_blocks,
            device=str(device),
            dtype=str(self.model_config.dtype).removeprefix("torch."),
            attention_backend=chosen.name,
            attention_reason=chosen.reason,
            weight_bytes=weight_bytes,
            kv_cache_bytes=num_blocks * demand.block_bytes + state_bytes,
            load_seconds=load_seconds,
            num_stages=self.ranks.pipeline.size,
            steps_in_flight=self._steps_in_flight,
            kv_layout=layout,
            cache_groups=all_groups,
            kv_compression=compacts,
            num_drafts=num_drafts,
            keeps_states=stages.num_snapshots is not None,
            num_snapshots=stages.num_snapshots or 0,
            max_model_len=fitting,
            max_source_tokens=(fitting or max_model_len) if sources else 0,
        )
        return StartedWorker(info, runner, operations, warmup, graphs, first_scaled, connector)

    # ------------------------------------------------------------ parts

    @property
    def _steps_in_flight(self) -> int:
        """One for each stage, and one that waits at the first."""
        return max(STEPS_IN_FLIGHT, self.ranks.pipeline.size + 1)

    def _stage(self, model: nn.Module, batch: PersistentBatch) -> PipelineStage:
        return PipelineStage(
            self.ranks.pipeline,
            batch.table,
            # Steps that are only compiled have decode rows beside the longest prompt.
            max_tokens=self._max_num_batched_tokens + self.config.max_num_seqs,
            incoming_size=getattr(model, "incoming_size", self.model_config.hidden_size),
            dtype=self.model_config.dtype,
            device=self.device,
        )

    def _batch(
        self,
        operations: Operations,
        max_model_len: int,
        *,
        num_groups: int = 1,
        compacts: bool = False,
        has_sources: bool = False,
        num_drafts: int = 0,
    ) -> PersistentBatch:
        return PersistentBatch(
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=self.config.block_size,
            device=self.device,
            operations=operations,
            num_groups=num_groups,
            compacts=compacts,
            has_sources=has_sources,
            num_drafts=num_drafts,
            steps_in_flight=self._steps_in_flight,
        )

    def _pooling_runner(
        self, model: nn.Module, backend: PagedBackend | None, batch: PersistentBatch
    ) -> PoolingRunner:
        pooling = self.model_config.pooling
        assert pooling is not None, "the model generates text"
        return PoolingRunner(
            model=model, pooling=pooling, backend=backend, batch=batch, device=self.device
        )

    def _model_runner(
        self,
        model: nn.Module,
        backend: PagedBackend,
        batch: PersistentBatch,
        states: States | None,
    ) -> ModelRunner:
        config, vocab_size, device = self.config, self.model_config.vocab_size, self.device
        history = batch.table.token_history
        setup = LogitsProcessorSetup(
            vocab_size=vocab_size,
            num_slots=config.max_num_seqs,
            max_model_len=batch.max_model_len,
            device=device,
            history=history,
        )
        operations = batch.operations
        sampling = SamplingState(
            config.max_num_seqs + 1, vocab_size, device, history, kernels=operations.samples
        )
        processors = Processors.load(self.plugins, config, setup)
        runner = ModelRunner(
            model=model,
            backend=backend,
            batch=batch,
            sampling=sampling,
            sampler=Sampler(sampling, processors, operations, rows_per_slot=1 + batch.num_drafts),
            vocab_size=vocab_size,
            device=device,
            masks=grammar_masks(self.ranks.tensor, config, vocab_size, device),
            ranks=self.ranks,
        )
        runner.states = states
        runner.drafting = load_drafting(
            self.plugins, config.speculative_config, batch.table, sampling, operations,
            batch.max_model_len,
        )  # fmt: skip
        return runner

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
        compactor = Compactor(
            compressor, described, layers, runner.batch.table, config.block_size, operations,
            self.model_config.dtype, ring,
        )  # fmt: skip
        runner.compactions = PlannedCompactions(compactor, self.device, divided=runner.divided)

    def _graphs(self, runner: ModelRunner | PoolingRunner) -> StepGraphs | None:
        """Return what records the runner's steps; None: they are not recorded."""
        if not isinstance(runner, ModelRunner) or not runner.backend.graph_safe:
            return None
        if not getattr(runner.model, "graph_safe", True):
            return None
        if (all2all := self.ranks.all2all) is not None and not all2all.recordable:
            return None
        if (recorder := self._recorder()) is None:
            return None
        return StepGraphs(runner, recorder, self._max_num_batched_tokens, self.ranks)

    def _warmup(self, runner: ModelRunner | PoolingRunner) -> Warmup:
        return Warmup(runner, self.config, runner.batch.max_model_len, self.device)


def _weight_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def _leave_a_core_for_the_loop(num_ranks: int) -> None:
    """Leave a core to the event loop: torch's CPU threads wait busily, so one per core would starve
    it. `num_ranks`: those that share the cores.

    The setting belongs to the calling (launch) thread; OMP_NUM_THREADS overrules it.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, ((os.cpu_count() or 2) - 1) // num_ranks))

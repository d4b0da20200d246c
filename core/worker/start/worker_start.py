"""Starts a worker: model, plugins, cache size, warm-up."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from ...cache.groups import CacheGroup
from ...config import EngineConfig
from ...errors import ConfigError
from ...loading.build import build_model
from ...loading.model_config import ModelConfig
from ...loading.model_tensors import ModelTensors
from ...nn.attention import Attention
from ...nn.operations import Operations
from ...nn.rotary import Rotary
from ...parallel.ranks import Ranks
from ...protocols.attention import BackendSetup, LayerSpec, PagedBackend
from ...protocols.executors import ExecutorInfo
from ...protocols.logits_processors import LogitsProcessorSetup
from ...registration.choice import choose
from ...registry import Plugins
from ..batch import STEPS_IN_FLIGHT, PersistentBatch
from ..graphs.recorder import Recorder
from ..kv_cache.allocation import bind_cache, form_cache_groups
from ..kv_cache.formats import QUANTIZED_WRITES, CacheFormats, choose_formats
from ..kv_cache.memory import (
    CacheDemand,
    bytes_per_block,
    bytes_per_token,
    num_kv_blocks,
    zeros,
)
from ..kv_cache.scales import to_be_scaled, unscaled
from ..mapped.regions import MappedMemory
from ..parts.adapters import AdaptersStart
from ..parts.kv_compression import KVCompressionStart
from ..parts.part import PartNeeds, PartSite, PartStart, StartContext, WorkerPart
from ..parts.speculation import SpeculationStart
from ..parts.states import StatesStart
from ..pooling_runner import PoolingRunner
from ..runner import ModelRunner
from ..sampling.masks import grammar_masks
from ..sampling.processors import Processors
from ..sampling.sampler import Sampler
from ..sampling.sampling_state import SamplingState
from ..selection import (
    CacheLayer,
    backend_kind,
    cache_layers,
    invariance_refusal,
    keys_and_values,
)
from ..shared_prefixes import SharedPrefixes
from .attention import ChosenBackend, choose_attention
from .cache_room import CacheRoom
from .parts import start_parts
from .stages import AllStages, StageFacts
from .step_graphs import StepGraphs
from .warmup import Warmup


@dataclass
class StartedWorker:
    """What steps need."""

    info: ExecutorInfo
    runner: ModelRunner | PoolingRunner
    operations: Operations
    warmup: Warmup
    tensors: ModelTensors
    """The model's, as it was built."""
    caches: Sequence[Mapping[str, torch.Tensor]] = ()
    """[layers that share no memory], parts by name."""
    graphs: StepGraphs | None = None
    """None: not recorded."""
    unscaled: list[Attention] = field(default_factory=list)
    """Layers whose cache scales the first step computes, before recording."""
    mapped: MappedMemory | None = None
    """What weights and caches are in; None: in torch's memory."""


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
        mapped: MappedMemory | None = None,
    ) -> None:
        """`config`: resolved. recorder: makes a recorder, or None. notify: KV transfers have a
        report; from any thread. mapped: what weights and caches go into; None: torch's memory.
        """
        assert config.max_num_batched_tokens is not None
        self.config = config
        self.model_config = model_config
        self.plugins = plugins
        self.ranks = ranks
        self.device = device
        self._max_num_batched_tokens: int = config.max_num_batched_tokens
        self._recorder = recorder
        self._notify = notify
        self._mapped = mapped
        self._zeros = zeros if mapped is None else mapped.zeros
        self._began = time.monotonic()

    @torch.inference_mode()
    def run(self) -> StartedWorker:
        device, model_config = self.device, self.model_config
        if self.ranks.pipeline.size > 1 and model_config.pooling is not None:
            raise ConfigError(
                "pipeline_parallel_size: models whose states are pooled run in one stage",
                param="pipeline_parallel_size",
            )
        if device.type == "cpu" or self.ranks.size > 1:
            _leave_a_core_for_the_loop(self.ranks.size)
        room = CacheRoom(self.config, self.ranks, device, self._mapped)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.reset_peak_memory_stats(device)
        name, operations_class, _ = choose(
            self.plugins["operations"],
            "operations",
            self.config.operations,
            lambda candidate: (
                invariance_refusal(candidate, self.config)
                or candidate.supports(device, model_config.dtype)
            ),
        )
        with self.plugins["operations"].calling(name, "its constructor"):
            operations = operations_class()
        model = build_model(self.plugins, self.config, model_config, device, operations, self.ranks)
        if self._mapped is not None:
            self._mapped.move(model)
        self._tensors = ModelTensors.of(model)
        if device.type == "cuda":
            # Memory needed only during loading (rounding, repacking) does not count for a step.
            torch.cuda.reset_peak_memory_stats(device)
        if model_config.pooling is not None and not model_config.pooling.causal:
            return self._start_encoder(model, operations)
        return self._start_decoder(model, operations, name, room)

    def _start_encoder(self, model: nn.Module, operations: Operations) -> StartedWorker:
        unscaled((), self.config, fp8_cache=False)
        batch = self._batch(operations, self.model_config.max_model_len)
        starts = []
        if self.config.enable_lora:
            start = self._start_context(
                model, operations, layers=(), key_values=(), kv_dtype=self.model_config.dtype
            )
            starts = [AdaptersStart(start)]
        runner = self._pooling_runner(model, None, batch, starts)
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
            parts=tuple(part.name for part in runner.parts),
        )
        return StartedWorker(info, runner, operations, warmup, self._tensors, mapped=self._mapped)

    def _start_decoder(
        self, model: nn.Module, operations: Operations, operations_name: str, room: CacheRoom
    ) -> StartedWorker:
        config, device = self.config, self.device
        weight_bytes = _weight_bytes(model)
        layers = cache_layers(model)
        with_keys = keys_and_values(layers, config)
        checkpoint_dtype = getattr(model, "kv_cache_dtype", None) if with_keys else None
        formats = choose_formats(with_keys, config, checkpoint_dtype, self.model_config.dtype)
        kv_dtype = formats.dtype
        if formats.quantized:
            _check_features(
                operations, operations_name, PartNeeds(QUANTIZED_WRITES), "kv_cache_dtype"
            )
        first_scaled = unscaled(formats.fp8_layers, config, formats.fp8_cache)
        starts = start_parts(
            self._start_context(
                model, operations, layers=layers, key_values=with_keys, kv_dtype=kv_dtype
            ),
            self._notify,
        )
        for start in starts:
            _check_features(operations, operations_name, start.needs, start.option)
        needs = [start.needs for start in starts]
        specs: list[LayerSpec] = [
            to_be_scaled(layer.spec)
            if isinstance(layer, Attention) and layer in first_scaled
            else layer.spec
            for layer in layers
        ]
        chosen = choose_attention(
            self.plugins,
            config,
            backend_kind(layers),
            [*specs, *(spec for need in needs for spec in need.specs)],
            device,
            self.model_config.dtype,
            formats=formats,
            needs=needs,
        )
        own_blocks = self._layers_of_parts(needs)
        layers = [*layers, *own_blocks]
        cache_specs = [layer.cache_spec(kv_dtype) for layer in layers]
        states = next((start.states for start in starts if isinstance(start, StatesStart)), None)
        stage_facts = StageFacts(
            specs=tuple(cache_specs),
            num_snapshots=None if states is None else states.num_snapshots,
            cache_groups=chosen.backend_class.cache_groups,
        )
        stages = AllStages(self.ranks.pipeline, stage_facts, device)
        refusal = None if stages.cache_groups else f"attention backend {chosen.name} reads them"
        max_model_len = self.model_config.max_model_len
        all_groups = form_cache_groups(stages.specs, refusal, config, max_model_len)
        groups = stages.own(all_groups)
        own_blocks = {layer: count * len(groups) for layer, count in own_blocks.items()}
        held_bytes = sum(need.nbytes for need in needs) + sum(
            count * config.block_size * bytes_per_token(layer.cache_spec(kv_dtype))
            for layer, count in own_blocks.items()
        )
        demand = CacheDemand(
            groups=(*all_groups, *[CacheGroup()] * sum(need.extra_tables for need in needs)),
            block_bytes=bytes_per_block(cache_specs, groups, config.block_size),
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_chunk=self._max_num_batched_tokens,
        )
        later_bytes = sum(need.later_bytes for need in needs)
        length = room.length_of_tables(demand, held_bytes + later_bytes)
        sizes = {name: size for need in needs for name, size in need.batch.items()}
        further = length + sizes.get("num_drafts", 0)
        models = [need.model for need in needs if need.model is not None]
        for positions, modules in ((length, [model]), (further, models)):
            for module in itertools.chain(*(each.modules() for each in modules)):
                if isinstance(module, Rotary):
                    module.fill(positions)
        backend = self._backend(chosen, length, config.max_num_seqs, specs)
        prefixes = None
        narrow = formats.quantized or formats.fp8_cache
        if config.enable_prefix_caching and not narrow and not sizes.get("compacts"):
            prefixes = self._shared_prefixes(backend, groups, length)
        batch = self._batch(operations, length, num_groups=len(groups), prefixes=prefixes, **sizes)
        runner: ModelRunner | PoolingRunner
        if self.model_config.pooling is not None:
            runner = self._pooling_runner(model, backend, batch, starts)
        else:
            runner = self._model_runner(
                model, backend, batch, starts,
                make_backend=functools.partial(self._backend, chosen),
                layers_backend=lambda own: self._layers_backend(own, chosen, further, starts),
            )  # fmt: skip
        graphs = self._graphs(runner)
        warmup = self._warmup(runner)
        caches = bind_cache(
            layers, groups, 2, config.block_size, kv_dtype, device, own_blocks, self._zeros
        )
        self._bind(starts, caches)
        with self.ranks.pause():
            # How much there is to compile depends on this host's files.
            warmup.precompile(operations, graphs)
        available = room.available(warmup, held_bytes, later_bytes)
        num_blocks = num_kv_blocks(config, demand, available)
        num_blocks = self.ranks.minimum_of_stages(num_blocks, device)
        fitting = None
        if config.max_model_len == "auto":
            fitting = min(length, demand.longest_of(num_blocks))
        caches = bind_cache(
            layers, groups, num_blocks, config.block_size, kv_dtype, device, own_blocks,
            self._zeros,
        )  # fmt: skip
        self._bind(starts, caches)
        warmup.warm_up()
        for part in runner.parts:
            part.warm_up()
        if graphs is not None and not first_scaled:
            graphs.record_first(device)
        load_seconds = time.monotonic() - self._began
        facts: dict[str, Any] = {}
        for start in starts:
            facts |= start.complete(num_blocks)
        info = ExecutorInfo(
            num_blocks=num_blocks,
            device=str(device),
            dtype=str(self.model_config.dtype).removeprefix("torch."),
            attention_backend=chosen.name,
            attention_reason=chosen.reason,
            weight_bytes=weight_bytes + sum(map(_weight_bytes, models)),
            kv_cache_bytes=num_blocks * demand.block_bytes + held_bytes + later_bytes,
            block_bytes=demand.block_bytes,
            load_seconds=load_seconds,
            num_stages=self.ranks.pipeline.size,
            steps_in_flight=self._steps_in_flight,
            cache_groups=all_groups,
            num_snapshots=stages.num_snapshots,
            max_model_len=fitting,
            parts=tuple(part.name for part in runner.parts),
            **facts,
        )
        return StartedWorker(
            info, runner, operations, warmup, self._tensors, caches, graphs, first_scaled,
            self._mapped,
        )  # fmt: skip

    def _backend(
        self,
        chosen: ChosenBackend,
        max_model_len: int,
        num_rows: int,
        layers: Sequence[LayerSpec] = (),
    ) -> PagedBackend:
        with self.plugins[chosen.kind].calling(chosen.name, "its constructor"):
            setup = BackendSetup(
                device=self.device,
                dtype=self.model_config.dtype,
                block_size=self.config.block_size,
                max_num_seqs=num_rows,
                max_num_batched_tokens=self._max_num_batched_tokens,
                max_model_len=max_model_len,
                layers=tuple(layers),
            )
            return chosen.backend_class.create(setup)

    def _layers_of_parts(self, needs: Sequence[PartNeeds]) -> dict[CacheLayer, int]:
        """Return the layers of parts' models that join the cache, with their own blocks."""
        own_blocks = {}
        for need in needs:
            for layer in () if need.model is None else cache_layers(need.model):
                if isinstance(layer, Attention):
                    layer.cache_format = self.model_config.dtype
                own_blocks[layer] = need.own_blocks * (self.config.max_num_seqs + 1)
        return own_blocks

    def _layers_backend(
        self,
        layers: Sequence[CacheLayer],
        chosen: ChosenBackend,
        max_model_len: int,
        starts: Sequence[PartStart],
    ) -> PagedBackend:
        """Return a backend for layers of a part's model: the target's, if it serves them."""
        kind, dtype = backend_kind(layers), self.model_config.dtype
        specs = [layer.spec for layer in layers]
        of_caches = (KVCompressionStart, SpeculationStart)
        needs = [start.needs for start in starts if isinstance(start, of_caches)]
        formats = CacheFormats(dtype, (), None)
        name = chosen.name if kind == chosen.kind else "auto"
        config = msgspec.structs.replace(self.config, attention_backend=name)
        own = choose_attention(
            self.plugins, config, kind, specs, self.device, dtype, formats=formats, needs=needs
        )
        return self._backend(own, max_model_len, self.config.max_num_seqs, specs)

    @staticmethod
    def _bind(starts: Sequence[PartStart], caches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        for start in starts:
            start.bind(caches)

    # ------------------------------------------------------------ parts

    @property
    def _steps_in_flight(self) -> int:
        """One per stage, and one waiting at the first."""
        return max(STEPS_IN_FLIGHT, self.ranks.pipeline.size + 1)

    def _start_context(
        self, model: nn.Module, operations: Operations, **layers: Any
    ) -> StartContext:
        return StartContext(
            config=self.config, model_config=self.model_config, plugins=self.plugins,
            ranks=self.ranks, device=self.device, model=model, operations=operations,
            mapped=self._mapped, **layers,
        )  # fmt: skip

    def _batch(
        self,
        operations: Operations,
        max_model_len: int,
        **sizes: Any,
    ) -> PersistentBatch:
        return PersistentBatch(
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=self.config.block_size,
            device=self.device,
            operations=operations,
            steps_in_flight=self._steps_in_flight,
            max_tokens=self._max_num_batched_tokens,
            **sizes,
        )

    def _shared_prefixes(
        self,
        backend: PagedBackend,
        groups: Sequence[CacheGroup],
        max_model_len: int,
    ) -> SharedPrefixes | None:
        """Return what follows the prefixes of rows; None: nothing reads them once."""
        most_rows = self.config.max_num_seqs
        whole = [number for number, group in enumerate(groups) if group.reach is None]
        if not whole or backend.least_shared_prefix(most_rows) is None:
            return None
        return SharedPrefixes(
            num_slots=most_rows,
            max_model_len=max_model_len,
            block_size=self.config.block_size,
            groups=whole,
            least_tokens=backend.least_shared_prefix,
        )

    def _pooling_runner(
        self,
        model: nn.Module,
        backend: PagedBackend | None,
        batch: PersistentBatch,
        starts: Sequence[PartStart],
    ) -> PoolingRunner:
        pooling = self.model_config.pooling
        assert pooling is not None, "the model generates text"
        return PoolingRunner(
            model=model, pooling=pooling, backend=backend, batch=batch, device=self.device,
            parts=[part for part in (start.make_pooling(batch) for start in starts) if part],
        )  # fmt: skip

    def _model_runner(
        self,
        model: nn.Module,
        backend: PagedBackend,
        batch: PersistentBatch,
        starts: Sequence[PartStart],
        **backends: Any,
    ) -> ModelRunner:
        config, vocab_size, device = self.config, self.model_config.vocab_size, self.device
        check_logprobs_mode(config, batch.operations)
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
        site = PartSite(batch, sampling, **backends)
        parts: list[WorkerPart] = [start.make(site) for start in starts]
        return ModelRunner(
            model=model,
            backend=backend,
            batch=batch,
            sampling=sampling,
            sampler=Sampler(
                sampling,
                processors,
                operations,
                rows_per_slot=1 + batch.num_drafts,
                logprobs_mode=config.logprobs_mode,
            ),
            vocab_size=vocab_size,
            device=device,
            masks=grammar_masks(self.ranks.tensor, config, vocab_size, device),
            ranks=self.ranks,
            parts=parts,
        )

    def _graphs(self, runner: ModelRunner | PoolingRunner) -> StepGraphs | None:
        """Return the runner's recorder of steps, or None."""
        if not isinstance(runner, ModelRunner) or not runner.backend.graph_safe:
            return None
        if not getattr(runner.model, "graph_safe", True):
            return None
        if (all2all := self.ranks.all2all) is not None and not all2all.recordable:
            return None
        if self.ranks.round is not None:
            return None  # Engines would have to agree on a width.
        if (recorder := self._recorder()) is None:
            return None
        return StepGraphs(runner, recorder, self._max_num_batched_tokens, self.ranks)

    def _warmup(self, runner: ModelRunner | PoolingRunner) -> Warmup:
        length = runner.batch.max_model_len
        return Warmup(runner, self.config, self.model_config, length, self.device)


def check_logprobs_mode(config: EngineConfig, operations: Operations) -> None:
    """Raises ConfigError for log-probabilities that sampling kernels do not compute."""
    if config.logprobs_mode != "raw_logprobs" and operations.samples:
        raise ConfigError(
            f"logprobs_mode: {config.logprobs_mode} is computed with operations=torch alone, and "
            "kernels sample here",
            param="logprobs_mode",
        )


def _check_features(operations: Operations, name: str, needs: PartNeeds, option: str) -> None:
    """Raises ConfigError, with the option's name, for missing features."""
    if lacking := needs.operations - operations.features:
        raise ConfigError(
            f"{option}: operations {name!r} do not support {', '.join(sorted(lacking))}",
            param=option,
        )


def _weight_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def _leave_a_core_for_the_loop(num_ranks: int) -> None:
    """Leave a core to the event loop: torch's CPU threads spin, and one per core would starve it.
    `num_ranks`: sharing the cores.

    Applies to the calling (launch) thread; OMP_NUM_THREADS overrides it.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, ((os.cpu_count() or 2) - 1) // num_ranks))

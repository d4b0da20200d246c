"""Starts a worker: model, plugins, cache size, warm-up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...config import EngineConfig
from ...errors import ConfigError
from ...loading.build import build_model
from ...loading.model_config import ModelConfig
from ...loading.model_tensors import ModelTensors
from ...nn.attention import Attention
from ...nn.operations import Operations
from ...parallel.ranks import Ranks
from ...protocols.attention import LayerSpec
from ...protocols.executors import ExecutorInfo
from ...registration.choice import choose
from ...registry import Plugins
from ..graphs.recorder import Recorder
from ..kv_cache.formats import QUANTIZED_WRITES, choose_formats
from ..kv_cache.memory import num_kv_blocks
from ..kv_cache.scales import to_be_scaled, unscaled
from ..mapped.regions import MappedMemory
from ..parts.adapters import AdaptersStart
from ..parts.part import PartNeeds, StartContext
from ..pooling_runner import PoolingRunner
from ..runner import ModelRunner
from ..selection import (
    CacheLayer,
    backend_kind,
    cache_layers,
    invariance_refusal,
    keys_and_values,
)
from .attention import choose_attention
from .cache_plan import CachePlan
from .cache_room import CacheRoom
from .make_runner import RunnerMaker
from .parts import start_parts
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
        start = self._start_context(
            model, operations, layers=(), key_values=(), kv_dtype=self.model_config.dtype
        )
        maker = RunnerMaker(start, [AdaptersStart(start)] if self.config.enable_lora else [])
        runner = maker.encoder_runner()
        warmup = self._warmup(runner)
        with self.ranks.pause():
            warmup.precompile(operations)
        if self.device.type == "cuda":
            # Run the largest possible step: memory that does not suffice fails the start, not a
            # request.
            warmup.run_largest()
        warmup.warm_up()
        info = self._info(
            maker,
            runner,
            num_blocks=0,
            attention_backend="encoder",
            attention_reason="whole prompts, no KV cache",
            weight_bytes=_weight_bytes(model),
            kv_cache_bytes=0,
            load_seconds=time.monotonic() - self._began,
        )
        return StartedWorker(info, runner, operations, warmup, self._tensors, mapped=self._mapped)

    def _start_decoder(
        self, model: nn.Module, operations: Operations, operations_name: str, room: CacheRoom
    ) -> StartedWorker:
        config = self.config
        weight_bytes = _weight_bytes(model)
        layers = cache_layers(model)
        with_keys = keys_and_values(layers, config)
        checkpoint_dtype = getattr(model, "kv_cache_dtype", None) if with_keys else None
        formats = choose_formats(with_keys, config, checkpoint_dtype, self.model_config.dtype)
        if formats.quantized:
            _check_features(
                operations, operations_name, PartNeeds(QUANTIZED_WRITES), "kv_cache_dtype"
            )
        first_scaled = unscaled(formats.fp8_layers, config, formats.fp8_cache)
        start = self._start_context(
            model, operations, layers=layers, key_values=with_keys, kv_dtype=formats.dtype
        )
        parts = start_parts(start, self._notify)
        for part in parts:
            _check_features(operations, operations_name, part.needs, part.option)
        needs = [part.needs for part in parts]
        models = [need.model for need in needs if need.model is not None]
        specs = _layer_specs(layers, first_scaled)
        chosen = choose_attention(
            self.plugins,
            config,
            backend_kind(layers),
            [*specs, *(spec for need in needs for spec in need.specs)],
            self.device,
            self.model_config.dtype,
            formats=formats,
            needs=needs,
        )
        plan = CachePlan(start, parts, chosen)
        length = room.length_of_tables(plan.demand, plan.held_bytes + plan.later_bytes)
        maker = RunnerMaker(start, parts)
        runner = maker.decoder_runner(chosen, specs, plan.groups, length, formats)
        graphs = self._graphs(runner)
        warmup = self._warmup(runner)
        plan.allocate(2)  # The null block and another one.
        with self.ranks.pause():
            # How much there is to compile depends on this host's files.
            warmup.precompile(operations, graphs)
        num_blocks = self._num_blocks(plan, room, warmup)
        caches = plan.allocate(num_blocks)
        warmup.warm_up()
        for worker_part in runner.parts:
            worker_part.warm_up()
        if graphs is not None and not first_scaled:
            graphs.record_first(self.device)
        load_seconds = time.monotonic() - self._began
        fitting = None
        if config.max_model_len == "auto":
            fitting = min(length, plan.demand.longest_of(num_blocks))
        facts: dict[str, Any] = {}
        for part in parts:
            facts |= part.complete(num_blocks)
        info = self._info(
            maker,
            runner,
            num_blocks=num_blocks,
            attention_backend=chosen.name,
            attention_reason=chosen.reason,
            weight_bytes=weight_bytes + sum(map(_weight_bytes, models)),
            kv_cache_bytes=plan.nbytes(num_blocks),
            block_bytes=plan.demand.block_bytes,
            load_seconds=load_seconds,
            cache_groups=plan.all_groups,
            num_snapshots=plan.num_snapshots,
            max_model_len=fitting,
            **facts,
        )
        return StartedWorker(
            info, runner, operations, warmup, self._tensors, caches, graphs, first_scaled,
            self._mapped,
        )  # fmt: skip

    def _num_blocks(self, plan: CachePlan, room: CacheRoom, warmup: Warmup) -> int:
        available = room.available(warmup, plan.held_bytes, plan.later_bytes)
        num_blocks = num_kv_blocks(self.config, plan.demand, available)
        return self.ranks.minimum_of_stages(num_blocks, self.device)

    def _start_context(
        self, model: nn.Module, operations: Operations, **layers: Any
    ) -> StartContext:
        return StartContext(
            config=self.config, model_config=self.model_config, plugins=self.plugins,
            ranks=self.ranks, device=self.device, model=model, operations=operations,
            mapped=self._mapped, **layers,
        )  # fmt: skip

    def _info(
        self, maker: RunnerMaker, runner: ModelRunner | PoolingRunner, **facts: Any
    ) -> ExecutorInfo:
        return ExecutorInfo(
            device=str(self.device),
            dtype=str(self.model_config.dtype).removeprefix("torch."),
            num_stages=self.ranks.pipeline.size,
            steps_in_flight=maker.steps_in_flight,
            parts=tuple(part.name for part in runner.parts),
            **facts,
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


def _layer_specs(
    layers: Sequence[CacheLayer], first_scaled: Sequence[Attention]
) -> list[LayerSpec]:
    """first_scaled: those whose cache scales the first step computes."""
    return [
        to_be_scaled(layer.spec)
        if isinstance(layer, Attention) and layer in first_scaled
        else layer.spec
        for layer in layers
    ]


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

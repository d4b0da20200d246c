"""Makes a worker's runner, with its batch and attention backend."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import nn

from ...cache.groups import CacheGroup
from ...config import EngineConfig
from ...errors import ConfigError
from ...nn.operations import Operations
from ...nn.rotary import Rotary
from ...protocols.attention import BackendSetup, LayerSpec, PagedBackend
from ...protocols.logits_processors import LogitsProcessorSetup
from ..batch import STEPS_IN_FLIGHT, PersistentBatch
from ..kv_cache.formats import CacheFormats
from ..parts.kv_compression import KVCompressionStart
from ..parts.part import PartSite, PartStart, StartContext
from ..parts.speculation import SpeculationStart
from ..pooling_runner import PoolingRunner
from ..runner import ModelRunner
from ..sampling.masks import grammar_masks
from ..sampling.processors import Processors
from ..sampling.sampler import Sampler
from ..sampling.sampling_state import SamplingState
from ..selection import CacheLayer, backend_kind
from ..shared_prefixes import SharedPrefixes
from .attention import ChosenBackend, choose_attention


class RunnerMaker:
    """Makes what steps run on, and the parts with it."""

    def __init__(self, start: StartContext, parts: Sequence[PartStart]) -> None:
        assert start.config.max_num_batched_tokens is not None
        self._start, self._parts = start, parts
        self._max_num_batched_tokens: int = start.config.max_num_batched_tokens

    @property
    def steps_in_flight(self) -> int:
        """One per stage, and one waiting at the first."""
        return max(STEPS_IN_FLIGHT, self._start.ranks.pipeline.size + 1)

    def encoder_runner(self) -> PoolingRunner:
        return self._pooling_runner(None, self._batch(self._start.model_config.max_model_len))

    def decoder_runner(
        self,
        chosen: ChosenBackend,
        specs: Sequence[LayerSpec],
        groups: Sequence[CacheGroup],
        max_model_len: int,
        formats: CacheFormats,
    ) -> ModelRunner | PoolingRunner:
        """specs: of the model's layers. groups: of this stage."""
        start = self._start
        backend = self._backend(chosen, max_model_len, start.config.max_num_seqs, specs)
        batch = self._decoder_batch(backend, groups, max_model_len, formats)
        _fill_rotary(start.model, max_model_len)
        for part in self._parts:
            if part.needs.model is not None:
                _fill_rotary(part.needs.model, max_model_len + batch.num_drafts)
        if start.model_config.pooling is not None:
            return self._pooling_runner(backend, batch)
        return self._model_runner(backend, batch, chosen)

    def _batch(self, max_model_len: int, **sizes: Any) -> PersistentBatch:
        start = self._start
        return PersistentBatch(
            max_num_seqs=start.config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=start.config.block_size,
            device=start.device,
            operations=start.operations,
            steps_in_flight=self.steps_in_flight,
            max_tokens=self._max_num_batched_tokens,
            **sizes,
        )

    def _decoder_batch(
        self,
        backend: PagedBackend,
        groups: Sequence[CacheGroup],
        max_model_len: int,
        formats: CacheFormats,
    ) -> PersistentBatch:
        sizes = {name: size for part in self._parts for name, size in part.needs.batch.items()}
        prefixes = None
        narrow = formats.quantized or formats.fp8_cache
        if self._start.config.enable_prefix_caching and not narrow and not sizes.get("compacts"):
            prefixes = self._shared_prefixes(backend, groups, max_model_len)
        return self._batch(max_model_len, num_groups=len(groups), prefixes=prefixes, **sizes)

    def _backend(
        self,
        chosen: ChosenBackend,
        max_model_len: int,
        num_rows: int,
        layers: Sequence[LayerSpec] = (),
    ) -> PagedBackend:
        start = self._start
        with start.plugins[chosen.kind].calling(chosen.name, "its constructor"):
            setup = BackendSetup(
                device=start.device,
                dtype=start.model_config.dtype,
                block_size=start.config.block_size,
                max_num_seqs=num_rows,
                max_num_batched_tokens=self._max_num_batched_tokens,
                max_model_len=max_model_len,
                layers=tuple(layers),
            )
            return chosen.backend_class.create(setup)

    def _shared_prefixes(
        self, backend: PagedBackend, groups: Sequence[CacheGroup], max_model_len: int
    ) -> SharedPrefixes | None:
        """Return what follows the prefixes of rows; None: nothing reads them once."""
        most_rows = self._start.config.max_num_seqs
        whole = [number for number, group in enumerate(groups) if group.reach is None]
        if not whole or backend.least_shared_prefix(most_rows) is None:
            return None
        return SharedPrefixes(
            num_slots=most_rows,
            max_model_len=max_model_len,
            block_size=self._start.config.block_size,
            groups=whole,
            least_tokens=backend.least_shared_prefix,
        )

    def _pooling_runner(
        self, backend: PagedBackend | None, batch: PersistentBatch
    ) -> PoolingRunner:
        start, pooling = self._start, self._start.model_config.pooling
        assert pooling is not None, "the model generates text"
        return PoolingRunner(
            model=start.model, pooling=pooling, backend=backend, batch=batch, device=start.device,
            parts=[made for part in self._parts if (made := part.make_pooling(batch)) is not None],
        )  # fmt: skip

    def _model_runner(
        self, backend: PagedBackend, batch: PersistentBatch, chosen: ChosenBackend
    ) -> ModelRunner:
        """chosen: the class of `backend`."""
        start = self._start
        config, vocab_size, device = start.config, start.model_config.vocab_size, start.device
        operations, history = start.operations, batch.table.token_history
        check_logprobs_mode(config, operations)
        setup = LogitsProcessorSetup(
            vocab_size=vocab_size,
            num_slots=config.max_num_seqs,
            max_model_len=batch.max_model_len,
            device=device,
            history=history,
        )
        sampling = SamplingState(
            config.max_num_seqs + 1, vocab_size, device, history, kernels=operations.samples
        )
        processors = Processors.load(start.plugins, config, setup)
        site = PartSite(
            batch,
            sampling,
            make_backend=functools.partial(self._backend, chosen),
            layers_backend=functools.partial(
                self._layers_backend,
                chosen=chosen,
                max_model_len=batch.max_model_len + batch.num_drafts,
            ),
        )
        parts = [part.make(site) for part in self._parts]
        return ModelRunner(
            model=start.model,
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
            masks=grammar_masks(start.ranks.tensor, config, vocab_size, device),
            ranks=start.ranks,
            parts=parts,
        )

    def _layers_backend(
        self, layers: Sequence[CacheLayer], chosen: ChosenBackend, max_model_len: int
    ) -> PagedBackend:
        """Return a backend for layers of a part's model: the target's, if it serves them."""
        start = self._start
        kind, dtype = backend_kind(layers), start.model_config.dtype
        specs = [layer.spec for layer in layers]
        of_caches = (KVCompressionStart, SpeculationStart)
        needs = [part.needs for part in self._parts if isinstance(part, of_caches)]
        formats = CacheFormats(dtype, (), None)
        name = chosen.name if kind == chosen.kind else "auto"
        config = msgspec.structs.replace(start.config, attention_backend=name)
        own = choose_attention(
            start.plugins, config, kind, specs, start.device, dtype, formats=formats, needs=needs
        )
        return self._backend(own, max_model_len, start.config.max_num_seqs, specs)


def _fill_rotary(model: nn.Module, num_positions: int) -> None:
    for module in model.modules():
        if isinstance(module, Rotary):
            module.fill(num_positions)


def check_logprobs_mode(config: EngineConfig, operations: Operations) -> None:
    """Raises ConfigError for log-probabilities that sampling kernels do not compute."""
    if config.logprobs_mode != "raw_logprobs" and operations.samples:
        raise ConfigError(
            f"logprobs_mode: {config.logprobs_mode} is computed with operations=torch alone, and "
            "kernels sample here",
            param="logprobs_mode",
        )

"""Builds what a speculator needs: its model, and the target's states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from torch import nn

from ...config import EngineConfig
from ...config.speculative_config import FIELD, SpeculativeConfig
from ...errors import ConfigError, LoadError
from ...loading.build import build_model
from ...loading.checkpoint_folder import checkpoint_folder
from ...loading.json_file import read_object
from ...loading.model_config import ModelConfig, resolve_model_config
from ...loading.model_tensors import ModelTensors
from ...loading.second_model import ModelBeside
from ...parallel.ranks import ONE_RANK, ONE_STAGE
from ...protocols.speculators import DraftSite, Speculator, SpeculatorNeeds
from ..mapped.regions import BESIDE
from ..selection import CacheLayer, cache_layers
from .draft_passes import DraftPasses, TokenStates
from .part import PartSite, StartContext
from .states import state_layers


def draft_needs(
    start: StartContext, speculator: type[Speculator], options: msgspec.Struct
) -> tuple[SpeculatorNeeds, list[CacheLayer], list[ModelBeside]]:
    """Return what the speculator needs, its model's layers, and what it was built from: in the last
    stage, which has it whole. Those before have what they pass on to it. Raises ConfigError,
    LoadError.
    """
    config, target_config = start.config.speculative_config, start.model_config
    assert config is not None, "no speculator is configured"
    pipeline = start.ranks.pipeline
    engine_config = _engine_config(start.config, config, target_config)
    draft_config = None
    if speculator.checkpoint != "none":
        draft_config = target_config
        if config.model is not None:
            draft_config = _resolved(engine_config, start, speculator)
    ranks = replace(start.ranks, pipeline=ONE_STAGE)
    if config.draft_tensor_parallel_size == 1:
        ranks = ONE_RANK

    built: list[tuple[nn.Module, ModelConfig, Any]] = []

    def load(model_config: ModelConfig, architecture: Any = None) -> nn.Module:
        assert pipeline.last, "the last stage has it"
        try:
            model = build_model(
                start.plugins,
                engine_config,
                model_config,
                start.device,
                start.operations,
                ranks,
                architecture,
            )
        except LoadError as error:
            raise LoadError(f"{FIELD}: {error.message}", param=FIELD) from error
        built.append((model, model_config, architecture))
        return model

    site = DraftSite(
        options=options, num_drafts=config.num_drafts, target=start.model,
        target_config=target_config, draft_config=draft_config, load=load,
    )  # fmt: skip
    registry = start.plugins["speculator"]
    passed_on: tuple[int, ...] = ()
    if pipeline.size > 1:
        with registry.calling(config.speculator, "tapped_layers"):
            passed_on = tuple(speculator.tapped_layers(site))
    if not pipeline.last:
        return SpeculatorNeeds(taps=passed_on), [], []
    with registry.calling(config.speculator, "needs"):
        needs = speculator.needs(site)
    _check(start, config, needs, passed_on)
    layers = [] if needs.model is None else cache_layers(needs.model)
    if config.max_model_len is not None:
        longest = min(config.max_model_len, needs.longest or config.max_model_len)
        needs = needs._replace(longest=longest)
    if start.mapped is not None:
        for model, _, _ in built:
            start.mapped.move(model, BESIDE)
    of_target = ModelTensors.of(start.model)
    in_checkpoint = speculator.checkpoint == "target" and config.model is None
    beside = [
        ModelBeside(
            engine_config, model_config, ranks, architecture,
            ModelTensors.of(model).without(of_target), in_checkpoint,
        )
        for model, model_config, architecture in built
    ]  # fmt: skip
    return needs, layers, beside


def token_states(start: StartContext, site: PartSite, needs: SpeculatorNeeds) -> TokenStates | None:
    """Return what this stage keeps of a step's tokens; None: nothing."""
    if needs == SpeculatorNeeds():
        return None
    model_config = start.model_config
    return TokenStates(
        start.model, site.batch.max_tokens, model_config.hidden_size, needs,
        dtype=model_config.dtype, device=start.device,
    )  # fmt: skip


def draft_passes(
    start: StartContext,
    site: PartSite,
    needs: SpeculatorNeeds,
    layers: Sequence[CacheLayer],
    states: TokenStates | None,
) -> DraftPasses | None:
    """Return the passes of a speculator; None: it needs nothing but tokens, or is in another
    stage."""
    if states is None or not start.ranks.pipeline.last:
        return None
    config = start.config.speculative_config
    assert config is not None, "no speculator is configured"
    batch, model_config = site.batch, start.model_config
    longest = batch.max_model_len + batch.num_drafts
    return DraftPasses(
        batch, site.sampling, needs.model, layers,
        site.layers_backend(layers) if layers else None, states, config.num_drafts,
        min(longest, needs.longest or longest),
        samples=config.draft_sample_method == "probabilistic",
        rejects=model_config.dtype if config.rejection_sample_method == "standard" else None,
    )  # fmt: skip


def _engine_config(
    config: EngineConfig, own: SpeculativeConfig, target_config: ModelConfig
) -> EngineConfig:
    """Return the options that a draft model is built with."""
    shared: dict[str, Any] = {
        "speculative_config": None, "enable_lora": False, "enable_eplb": False,
        "enable_expert_parallel": False, "max_model_len": None,
        "dtype": str(target_config.dtype).removeprefix("torch."),
    }  # fmt: skip
    if own.model is not None:
        shared |= {
            "model": own.model, "revision": own.revision, "quantization": own.quantization,
            "hf_overrides": None, "served_model_name": (), "generation_config": "vllm",
            "load_format": own.draft_load_config.load_format,
            "model_loader_extra_config": own.draft_load_config.model_loader_extra_config,
        }  # fmt: skip
    return msgspec.structs.replace(config, **shared)


def _resolved(
    config: EngineConfig, start: StartContext, speculator: type[Speculator]
) -> ModelConfig:
    """Return the draft checkpoint's configuration, for sequences of the target's length at most."""
    try:
        raw = read_object(checkpoint_folder(config.model, config.revision) / "config.json")
        config = msgspec.structs.replace(config, hf_overrides=dict(speculator.overrides(raw)))
        draft = resolve_model_config(config, start.plugins)
    except (ConfigError, LoadError) as error:
        raise ConfigError(f"{FIELD}: {error.message}", param=FIELD) from error
    return replace(draft, max_model_len=min(draft.max_model_len, start.model_config.max_model_len))


def _check(
    start: StartContext,
    config: SpeculativeConfig,
    needs: SpeculatorNeeds,
    passed_on: tuple[int, ...],
) -> None:
    """Raises ConfigError for needs that the target does not meet, or a model that is not served.
    passed_on: layers whose inputs other stages send."""
    name, architecture = config.speculator, start.model_config.architecture

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"{FIELD}: {name!r} {reason}", param=FIELD)

    if needs.hidden and not hasattr(start.model, "last_states"):
        raise refuse(f"reads last hidden states, and {architecture} gives none (last_states)")
    if needs.taps:
        if not getattr(start.model, "taps", False):
            raise refuse(f"reads inputs of layers, and {architecture} keeps none (taps)")
        layers = start.model_config.num_layers
        if beyond := [tap for tap in needs.taps if not 0 <= tap < layers]:
            raise refuse(f"reads the inputs of layers {beyond}, and {architecture} has {layers}")
    if needs.model is not None and state_layers(needs.model):
        raise refuse("has a model that keeps states of sequences, which do not go back")
    if start.ranks.pipeline.size > 1 and tuple(needs.taps) != passed_on:
        raise refuse(
            f"reads the inputs of layers {list(needs.taps)}, and its tapped_layers tell other "
            f"stages to pass on those of {list(passed_on)} (pipeline_parallel_size)"
        )

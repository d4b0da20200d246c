"""From a model configuration to a loaded module."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..config import EngineConfig
from ..errors import ConfigError, PluginError, listed
from ..nn.context import BuildContext
from ..nn.experts import Experts
from ..nn.operations import Operations
from ..parallel.ranks import ONE_RANK, Ranks
from ..protocols.media import MediaSetup
from ..protocols.quantization import QuantizationMethod
from ..registration.architecture import registered_name
from ..registration.registered import Registry
from ..registry import Plugins
from .model_config import ModelConfig
from .quantize import choose_method, place_layers, quantized_layers
from .tensors.tied_heads import OwnHead

logger = logging.getLogger("jackfield.loading")
HEAD = "lm_head."
"""Prefix of head tensors, which pooling ignores."""


def build_model(
    plugins: Plugins,
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    operations: Operations,
    ranks: Ranks = ONE_RANK,
    architecture: Any = None,
) -> nn.Module:
    """Build the architecture and fill this rank's part. Raises ConfigError, LoadError.

    A quantization method's cache type is the module's `kv_cache_dtype`. architecture: class; None:
    the registered one.
    """
    start = time.monotonic()
    if model_config.media is not None:
        logger.info(
            "model: of %s text is served, as %s, and %s in prompts", model_config.text_part_of,
            model_config.architecture, " and ".join(model_config.media.modalities),
        )  # fmt: skip
    elif model_config.text_part_of is not None:
        logger.info(
            "model: of %s the text part is served, as %s, without images or sound: %s",
            model_config.text_part_of, model_config.architecture, model_config.text_alone,
        )  # fmt: skip
    choose_loader(plugins, config, model_config)  # Before the layers are made.
    method = choose_method(plugins, config, model_config, device)
    model = load_model(
        plugins, config, model_config, device, operations, ranks, method, architecture
    )
    finish_model(plugins, config, model_config, model, architecture)
    logger.info("weights: %s in %.2f s", config.load_format, time.monotonic() - start)
    return model


def load_model(
    plugins: Plugins,
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    operations: Operations,
    ranks: Ranks,
    method: QuantizationMethod | None,
    architecture: Any = None,
) -> nn.Module:
    """Return the filled architecture, or class `architecture`; if the checkpoint has a head despite
    tied embeddings, it is rebuilt untied. Raises ConfigError, LoadError.
    """

    def filled(model_config: ModelConfig) -> nn.Module:
        model = construct_model(
            plugins, config, model_config, device, operations, ranks, method, architecture
        )
        load_weights(plugins, config, model_config, model, device, ranks)
        return model

    try:
        return filled(model_config)
    except OwnHead as error:
        logger.warning(
            "model: %s. It is loaded as a head of its own, and the checkpoint is read twice",
            error.message,
        )
    return filled(untied(model_config))


def untied(model_config: ModelConfig) -> ModelConfig:
    """Return the configuration of the same model with a head of its own."""
    hf_config = copy.copy(model_config.hf_config)
    hf_config.tie_word_embeddings = False
    return replace(model_config, hf_config=hf_config)


def finish_model(
    plugins: Plugins,
    config: EngineConfig,
    model_config: ModelConfig,
    model: nn.Module,
    architecture: Any = None,
) -> None:
    """Let the modules of a filled model derive what they compute with, once."""
    name = _registered_name(plugins, config, model_config) if architecture is None else None
    with plugins["model"].calling(name, "after_loading"):
        for module in reversed(list(model.modules())):
            if hasattr(module, "after_loading"):
                module.after_loading()  # type: ignore[operator]
    model.eval()
    model.requires_grad_(False)


def construct_model(
    plugins: Plugins,
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    operations: Operations,
    ranks: Ranks,
    method: QuantizationMethod | None,
    architecture: Any = None,
) -> nn.Module:
    """Return the architecture, or class `architecture`, on `device`, unloaded, with `method`'s
    layers. Raises ConfigError.
    """
    registry, name = plugins["model"], None
    if architecture is None:
        name = _registered_name(plugins, config, model_config)
    build = BuildContext(
        device=device,
        dtype=model_config.dtype,
        operations=operations,
        defer_weights=method is not None,
        ranks=ranks,
        unit=getattr(method, "unit", 1),
        every_token=config.enable_return_routed_experts,
        redundant_experts=config.eplb_config.num_redundant_experts if config.enable_eplb else None,
    )
    divides = bool(getattr(architecture, "tensor_parallel", False))
    if name is not None:
        architecture, divides = registry.load(name), is_tensor_parallel(registry, name)
    if ranks.tensor.size > 1 and not divides:
        raise ConfigError(
            f"tensor_parallel_size: {model_config.architecture} cannot be divided among ranks",
            param="tensor_parallel_size",
        )
    if ranks.pipeline.size > 1 and not getattr(architecture, "pipeline_parallel", False):
        raise ConfigError(
            f"pipeline_parallel_size: the layers of {model_config.architecture} cannot be divided "
            "among stages",
            param="pipeline_parallel_size",
        )
    if config.batch_invariant:
        _check_invariant(architecture, model_config)
    with registry.calling(name, "its constructor"):
        model: nn.Module = architecture(model_config, build)
    if model_config.media is not None:
        media = plugins["media_model"]
        kind = model_config.media.architecture
        with media.calling(kind, "encoder"):
            setup = MediaSetup(model_config.path, model_config.whole_config)
            model.media = media.load(kind).encoder(setup, build)
    if changes := _changed_map(model, model_config):
        weight_map: Any = model.weight_map
        model.weight_map = replace(weight_map, **changes)
    # A stage may have no layer with experts where others have some.
    whole = ranks.pipeline.size == 1
    has_experts = any(isinstance(module, Experts) for module in model.modules())
    if config.enable_expert_parallel and whole and not has_experts:
        raise ConfigError(
            f"enable_expert_parallel: {model_config.architecture} has no experts as this "
            "configuration builds it; leave the option out",
            param="enable_expert_parallel",
        )
    if method is not None:
        place_layers(model, model.weight_map, method, build)  # type: ignore[arg-type]
        variant = [layer for layer in quantized_layers(model).values() if not layer.batch_invariant]
        if config.batch_invariant and variant:
            raise ConfigError(
                f"batch_invariant: products of quantization {method.name!r} are not",
                param="batch_invariant",
            )
        model.kv_cache_dtype = getattr(method, "kv_cache_dtype", None)  # type: ignore[assignment]
    return model


def _check_invariant(architecture: Any, model_config: ModelConfig) -> None:
    """Raises ConfigError if the batch may change the bits of a model's results."""
    reason = None
    if model_config.pooling is not None:
        reason = "it is for models that generate text"
    elif not getattr(architecture, "batch_invariant", False):
        reason = f"{model_config.architecture} has products or sums of its own, in no fixed order"
    if reason is not None:
        raise ConfigError(f"batch_invariant: {reason}", param="batch_invariant")


def is_tensor_parallel(registry: Registry[Any], name: str) -> bool:
    """Return whether ranks can divide an architecture; in plugins for hooks version 2, the class or
    its bases say so.
    """
    architecture = registry.load(name)
    if registry.entry(name).api < 3:
        return bool(vars(architecture).get("tensor_parallel", False))
    return bool(getattr(architecture, "tensor_parallel", False))


def _changed_map(model: nn.Module, model_config: ModelConfig) -> dict[str, Any]:
    """Return a checkpoint's changes of the model's weight map."""
    changes: dict[str, Any] = {}
    weight_map: Any = model.weight_map
    if model_config.text_part_of is not None:
        changes["text_part"] = True
    if model_config.media is not None:
        encoder: Any = model.media
        changes["media"] = encoder.weight_map
    pooling = model_config.pooling
    if pooling is not None and pooling.tokens is None:
        changes |= {"tied": {}, "ignored": (*weight_map.ignored, HEAD)}
    return changes


def choose_loader(
    plugins: Plugins, config: EngineConfig, model_config: ModelConfig
) -> tuple[str, Any]:
    """Return name and class of the weight loader.

    Raises ConfigError if missing, or for unknown `model_loader_extra_config`.
    """
    name = model_config.load_format if config.load_format == "auto" else config.load_format
    try:
        loader = plugins["weight_loader"].load(name)
    except PluginError as error:
        raise ConfigError(f"load_format: {error}", param="load_format") from error
    options = config.model_loader_extra_config or {}
    check_extra_config(name, loader, options, "model_loader_extra_config")
    return name, loader


def check_extra_config(name: str, loader: Any, options: Mapping[str, Any], field: str) -> None:
    """Raise ConfigError, with the field's name, for unknown loader options."""
    taken = tuple(getattr(loader, "extra_config", ()))
    if unknown := sorted(options.keys() - set(taken)):
        others = f"it takes {listed(taken)}" if taken else "it takes no options"
        raise ConfigError(f"{field}: the loader {name} has no {listed(unknown)}; {others}",
                          param=field)  # fmt: skip


def load_weights(
    plugins: Plugins,
    config: EngineConfig,
    model_config: ModelConfig,
    model: nn.Module,
    device: torch.device,
    ranks: Ranks,
) -> None:
    name, loader = choose_loader(plugins, config, model_config)
    with plugins["weight_loader"].calling(name, "load"):
        rank_arguments = (ranks,) if getattr(loader, "per_rank", False) else ()
        loader(config, model_config, *rank_arguments).load(model, device)


def _registered_name(plugins: Plugins, config: EngineConfig, model_config: ModelConfig) -> str:
    model_type = getattr(model_config.hf_config, "model_type", None)
    return registered_name(plugins["model"], config, model_config.architecture, model_type)

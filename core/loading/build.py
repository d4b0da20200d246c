"""From a model configuration to a loaded module."""

from __future__ import annotations

import logging
import time

import torch
from torch import nn

from ..config import EngineConfig
from ..errors import ConfigError, PluginError
from ..nn.context import BuildContext
from ..nn.operations import Operations
from ..parallel.ranks import ONE_RANK, Ranks
from ..registration.architecture import registered_name
from ..registry import Plugins
from .model_config import ModelConfig
from .quantize import choose_method, place_layers

logger = logging.getLogger("jackfield.loading")


def build_model(
    plugins: Plugins,
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    operations: Operations,
    ranks: Ranks = ONE_RANK,
) -> nn.Module:
    """Build the architecture on `device` and fill it, with several ranks the part of this one.
    Raises ConfigError, LoadError.

    A quantization method's wish for the cache is the module's `kv_cache_dtype`.
    """
    start = time.monotonic()
    registry = plugins["model"]
    model_type = getattr(model_config.hf_config, "model_type", None)
    name = registered_name(registry, config, model_config.architecture, model_type)
    load_format = "safetensors" if config.load_format == "auto" else config.load_format
    try:
        loader_class = plugins["weight_loader"].load(load_format)
    except PluginError as error:
        raise ConfigError(f"load_format: {error}", param="load_format") from error
    method = choose_method(plugins, config, model_config, device)
    build = BuildContext(
        device=device,
        dtype=model_config.dtype,
        operations=operations,
        defer_weights=method is not None,
        ranks=ranks,
        unit=getattr(method, "unit", 1),
    )
    architecture = registry.load(name)
    if ranks.tensor.size > 1 and not vars(architecture).get("tensor_parallel", False):
        raise ConfigError(
            f"tensor_parallel_size: {model_config.architecture} cannot be divided among ranks",
            param="tensor_parallel_size",
        )
    with registry.calling(name, "its constructor"):
        model: nn.Module = architecture(model_config, build)
    if method is not None:
        place_layers(model, model.weight_map, method, build)  # type: ignore[arg-type]
        model.kv_cache_dtype = getattr(method, "kv_cache_dtype", None)  # type: ignore[assignment]
    with plugins["weight_loader"].calling(load_format, "load"):
        loader_class(config, model_config).load(model, device)
    with registry.calling(name, "after_loading"):
        for module in reversed(list(model.modules())):
            if hasattr(module, "after_loading"):
                module.after_loading()  # type: ignore[operator]
    model.eval()
    model.requires_grad_(False)
    logger.info("weights: %s in %.2f s", load_format, time.monotonic() - start)
    return model

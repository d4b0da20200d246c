"""Chooses a model's quantization method, and replaces its layers before weights load."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..config import EngineConfig
from ..errors import ConfigError, PluginError
from ..nn.context import BuildContext
from ..nn.embedding import Embedding
from ..nn.experts import ExpertLinear
from ..nn.linear import Linear
from ..nn.quantized import LinearSpec, QuantizedEmbedding, QuantizedLinear, Role
from ..protocols.quantization import QuantizationMethod
from ..registry import Plugins
from .model_config import ModelConfig
from .tensors.staging import divided_axes
from .weight_map import WeightMap

logger = logging.getLogger("jackfield.loading")


def choose_method(
    plugins: Plugins, config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> QuantizationMethod | None:
    """Return the method of `EngineConfig.quantization`, else the checkpoint's, or None.

    Raises ConfigError if they disagree, or the method refuses.
    """
    settings: Mapping[str, Any] = model_config.quantization_config or {}
    own = settings.get("quant_method")
    if settings and not isinstance(own, str):
        raise ConfigError(
            f"quantization_config.quant_method: must be the name of a method, got {own!r}",
            param="quantization_config.quant_method",
        )
    requested = config.quantization
    name = requested or own
    if name is None:
        return None
    method_class = _load(plugins, name, "quantization" if requested else "quant_method")
    if (
        requested
        and own
        and requested != own
        and _load(plugins, own, "quant_method") is not method_class
    ):
        raise ConfigError(
            f"quantization: {requested!r} was requested, but the checkpoint is {own!r}; leave the "
            "option out",
            param="quantization",
        )
    registry = plugins["quantization"]
    with registry.calling(name, "supports"):
        reason = method_class.supports(device, model_config.dtype)
    if reason is not None:
        raise ConfigError(f"quantization: {name!r} cannot run here: {reason}", param="quantization")
    try:
        with registry.calling(name, "from_config"):
            return method_class.from_config(settings)
    except ConfigError as error:
        if (file := model_config.quantization_file) is None or error.param is None:
            raise
        raise ConfigError(f"model: {file}: {error.message}", param=error.param) from error


def _load(plugins: Plugins, name: str, field: str) -> type[QuantizationMethod]:
    try:
        method: type[QuantizationMethod] = plugins["quantization"].load(name)
    except PluginError as error:
        raise ConfigError(f"{field}: {error}", param="quantization") from error
    return method


def place_layers(
    model: nn.Module, weight_map: WeightMap, method: QuantizationMethod, build: BuildContext
) -> None:
    """Replace the layers that `method` takes, and allocate others' weights."""
    heads = {name.removesuffix(".weight") for name in weight_map.tied}
    num_quantized = num_plain = 0
    for prefix, module in list(model.named_modules()):
        if not isinstance(module, Linear | Embedding):
            continue
        role: Role = "linear"
        if isinstance(module, ExpertLinear):
            role = "experts"
        elif isinstance(module, Embedding):
            role = "head" if prefix in heads else "embedding"
        layer = method.layer(_spec(prefix, module, role, weight_map, build))
        if layer is None:
            num_plain += 1
            module.weight = nn.Parameter(build.empty(*module.weight.shape))
            continue
        if module.shardings and not isinstance(module, Embedding):
            _divide(layer, module, method.name)
        if isinstance(module, ExpertLinear):
            layer.expert_share = module.expert_share
        num_quantized += 1
        if (bias := getattr(module, "bias", None)) is not None:
            rows = layer.spec.out_features
            layer.bias = bias if len(bias) == rows else nn.Parameter(build.empty(rows))
        parent, _, name = prefix.rpartition(".")
        placed = QuantizedEmbedding(layer) if role == "embedding" else layer
        setattr(model.get_submodule(parent), name, placed)
    if not num_quantized:
        raise ConfigError(
            f"quantization: {method.name!r} takes none of this model's layers", param="quantization"
        )
    logger.info(
        "quantization: %s, %d layers; %d left as they are", method.name, num_quantized, num_plain
    )


def _divide(layer: QuantizedLinear, module: Linear, method: str) -> None:
    """Give a layer the replaced module's shardings. Raises ConfigError if ranks cannot divide its
    tensors.
    """
    prefix = layer.spec.prefix
    specs = {
        leaf: spec for rows in layer.spec.shards.values()
        for leaf, spec in layer.tensors(rows).items()
    }  # fmt: skip
    lacking = [leaf for leaf, spec in specs.items() if spec.axes is None]
    if lacking:
        raise ConfigError(
            f"tensor_parallel_size: ranks cannot divide {prefix}, quantized by {method!r} "
            f"({lacking[0]})",
            param="tensor_parallel_size",
        )
    layer.sharding = module.shardings["weight"]
    layer.shardings = {leaf: s for leaf, s in module.shardings.items() if leaf == "bias"}
    for spec in specs.values():
        try:
            list(divided_axes(layer.sharding, spec))
        except ConfigError as error:
            raise ConfigError(f"{error.message}: {prefix}", param=error.param) from error


def _spec(
    prefix: str,
    module: Linear | Embedding,
    role: Role,
    weight_map: WeightMap,
    build: BuildContext,
) -> LinearSpec:
    rows, size = module.weight.shape
    if isinstance(module, Embedding):
        # Every rank has all of it, so that rows of any format can be looked up.
        rows = module.vocab_size
    cuts: Mapping[str, slice] = getattr(module, "shards", None) or {"": slice(0, rows)}
    shards = {name: cut.stop - cut.start for name, cut in cuts.items()}
    return LinearSpec(
        prefix=prefix,
        role=role,
        in_features=size,
        shards=shards,
        sources={name: weight_map.source(prefix, name or None) for name in shards},
        gated=bool(getattr(module, "gated", False)),
        device=build.device,
        dtype=build.dtype,
        operations=build.operations,
    )


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantized layers by original name, their tensors' prefix."""
    return {m.spec.prefix: m for m in model.modules() if isinstance(m, QuantizedLinear)}

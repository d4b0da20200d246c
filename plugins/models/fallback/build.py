"""Creates `transformers`' model for a configuration, with memory for the parts that are not
replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ....core.loading.model_config import ModelConfig
from ....core.nn.context import BuildContext
from .attention import NAME, refused

STRETCHED = ("dynamic", "longrope")
"""Ropes whose angles transformers recomputes for the longest sequence of a batch."""
KINDS = frozenset({"full_attention", "sliding_attention"})
"""Layer types whose attention is defined by its arguments."""


_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Create modules on "meta", and leave out their initial values.

    One thread at a time: meanwhile `transformers` replaces functions of torch, and of two threads
    the second would put back what the first had replaced them by.
    """
    with _one_at_a_time, torch.device("meta"), no_init_weights():
        yield


def model_class(architecture: str) -> Any:
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return None
    return getattr(transformers, architecture, None)


def empty_model(config: ModelConfig) -> Any:
    """Create transformers' model on "meta". Raises ConfigError if its attention is not replaceable,
    or it does not take the step's positions.
    """
    kind = model_class(config.architecture)
    if kind is None:
        raise refused(f"transformers has no model {config.architecture!r}")
    if not kind._supports_attention_backend:
        raise refused("its class does not let others compute its attention")
    hf_config = kind.config_class.from_dict(config.hf_config.to_dict())
    if getattr(hf_config, "is_encoder_decoder", False) or getattr(
        hf_config, "add_cross_attention", False
    ):
        raise refused("it attends to the states of an encoder")
    _check_windows(hf_config, config.max_model_len)
    hf_config.output_router_logits = False
    hf_config._attn_implementation = NAME
    with on_meta():
        model = kind(hf_config)
        model.tie_weights()
    model.eval()
    base = model._modules.get(base_name(model))
    if base is None or "position_ids" not in inspect.signature(base.forward).parameters:
        raise refused("its class takes no positions")
    return model


def base_name(model: Any) -> str:
    prefix: str = model.base_model_prefix
    return prefix if prefix in model._modules else "model"


def _check_windows(hf: Any, max_model_len: int) -> None:
    """Raise ConfigError for attention that only a mask limits."""
    kinds = set(getattr(hf, "layer_types", None) or ()) - KINDS
    chunk = getattr(hf, "attention_chunk_size", None)
    if "chunked_attention" in kinds and chunk is not None and max_model_len <= chunk:
        kinds.remove("chunked_attention")
    if kinds:
        raise refused(f"layer_types: {', '.join(sorted(map(str, kinds)))}")


def windows(hf: Any, num_layers: int) -> list[int | None]:
    window = getattr(hf, "sliding_window", None)
    kinds = getattr(hf, "layer_types", None)
    if window is None or getattr(hf, "use_sliding_window", True) is False:
        return [None] * num_layers
    if kinds is None:
        return [int(window)] * num_layers
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]


class Ropes:
    """Length-dependent rotations, fixed for the longest sequence served."""

    def __init__(self, model: nn.Module, max_model_len: int) -> None:
        self.length = max_model_len
        self.found: list[tuple[Any, str]] = []
        for module in model.modules():
            kind: Any = getattr(module, "rope_type", None)
            if isinstance(kind, dict) and set(kind.values()) & set(STRETCHED):
                raise refused(f"rope_type: {kind}")
            if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
                self.found.append((module, kind))
                module.rope_type = "default"  # type: ignore[assignment]

    def fill(self) -> None:
        for module, kind in self.found:
            init = ROPE_INIT_FUNCTIONS[kind]
            angles, module.attention_scaling = init(module.config, None, seq_len=self.length)
            module.inv_freq.copy_(angles)


def allocate(model: Any, build: BuildContext) -> None:
    """Give memory to parameters and buffers on "meta", and fill buffers that no checkpoint has.

    Buffers that checkpoints have become parameters. Raises ConfigError for others.
    """
    wide = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())]
    if build.dtype == torch.float16:
        wide += getattr(model, "_keep_in_fp32_modules", None) or ()
    parameters: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta or _ours(module):
                continue
            if id(parameter) not in parameters:
                parameters[id(parameter)] = _parameter(f"{prefix}.{name}", parameter, wide, build)
            module._parameters[name] = parameters[id(parameter)]
        own = [name for name, buffer in module._buffers.items() if buffer is not None]
        for name in own:
            if name in module._non_persistent_buffers_set:
                continue
            buffer = module._buffers.pop(name)
            if buffer is None or not buffer.is_floating_point():
                raise refused(f"{prefix}.{name} holds whole numbers")
            parameter = _parameter(f"{prefix}.{name}", buffer, wide, build)
            module.register_parameter(name, parameter)
        _fill_buffers(model, module, prefix, build)


def _ours(module: nn.Module) -> bool:
    return hasattr(module, "shardings")


def _parameter(name: str, like: torch.Tensor, wide: list[str], build: BuildContext) -> nn.Parameter:
    kept = any(re.search(pattern, name) for pattern in wide)
    dtype = torch.float32 if kept else build.dtype
    return nn.Parameter(torch.empty(like.shape, dtype=dtype, device=build.device))


def _fill_buffers(model: Any, module: Any, prefix: str, build: BuildContext) -> None:
    """Let transformers compute a module's buffers on "meta", and check that it did."""
    own = [
        name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta
    ]
    if not own:
        return
    buffers = [torch.empty_like(module._buffers[name], device=build.device) for name in own]
    module._buffers.update(zip(own, buffers, strict=True))
    results = []
    for value in (0, 1):  # What keeps both was not computed.
        for buffer in buffers:
            buffer.fill_(value)
        with torch.no_grad():
            model._init_weights(module)
        results.append([module._buffers[name].clone() for name in own])
    for name, first, second in zip(own, *results, strict=True):
        if not torch.equal(first, second):
            raise refused(f"transformers does not say what {prefix}.{name} holds")

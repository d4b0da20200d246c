"""Makes an EngineConfig concrete for this machine: the device, and what depends on it."""

from __future__ import annotations

import msgspec
import torch

from ..config import EngineConfig
from ..errors import ConfigError, PluginError
from ..registry import Plugins
from ..structured.store import check_backend

NAMED = {
    "executor": "executor",
    "scheduling_policy": "schedule_policy",
    "reasoning_parser": "reasoning_parser",
    "tool_call_parser": "tool_parser",
}
"""Options that name a plugin → its kind. The worker looks after the others, which need a device."""
TOKEN_BUDGET = {"cuda": 8192, "cpu": 2048}


def resolve_config(config: EngineConfig) -> EngineConfig:
    """`device` and `max_num_batched_tokens` filled in. Raises ConfigError."""
    device: str = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device: cuda was asked for, but torch finds no CUDA device here; use cpu or auto",
            param="device",
        )
    budget = config.max_num_batched_tokens or max(TOKEN_BUDGET[device], config.max_num_seqs)
    if budget < config.max_num_seqs:
        config = msgspec.structs.replace(config, max_num_seqs=budget)
    return msgspec.structs.replace(config, device=device, max_num_batched_tokens=budget)


def check_names(config: EngineConfig, plugins: Plugins) -> None:
    """Import what the options name. Raises ConfigError with the option's name."""
    for option, kind in NAMED.items():
        name = getattr(config, option)
        if name is None:
            continue
        try:
            plugins[kind].load(name)
        except PluginError as error:
            raise ConfigError(f"{option}: {error}", param=option) from error
    check_backend(plugins["structured_backend"], config.structured_outputs_config.backend)

"""Makes an EngineConfig concrete for this machine: the device, and what depends on it."""

from __future__ import annotations

import msgspec
import torch

from ..config import EngineConfig
from ..errors import ConfigError

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

"""What a start does before it knows its model: wake the device, load what kernels are made with."""

from __future__ import annotations

import logging

import torch

from ..config import EngineConfig
from ..registry import Plugins

logger = logging.getLogger("jackfield.worker")


def get_ready(config: EngineConfig, plugins: Plugins) -> None:
    """Never raises: the start proper says what does not work here.

    `config`: its `device` is concrete. The first of the operations that could be chosen readies
    itself, too.
    """
    if config.device != "cuda":
        return
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        torch.empty(1, device=device)
        registry = plugins["operations"]
        names = [entry.name for entry in registry.entries()]
        name = config.operations if config.operations != "auto" else names[0]
        registry.load(name).get_ready(device)
    except Exception:
        logger.debug("getting ready ahead failed", exc_info=True)

"""What a start does before it knows its model: wake the device, load what kernels are made with."""

from __future__ import annotations

import logging
import threading

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
        aside = threading.Thread(target=_ready_operations, args=(config, plugins, device))
        aside.start()
        torch.empty(1, device=device)
        aside.join()
    except Exception:
        logger.debug("the device does not wake up", exc_info=True)


def _ready_operations(config: EngineConfig, plugins: Plugins, device: torch.device) -> None:
    try:
        registry = plugins["operations"]
        name = config.operations
        if name == "auto":
            name = registry.entries()[0].name
        registry.load(name).get_ready(device)
    except Exception:
        logger.debug("operations cannot get ready ahead", exc_info=True)

"""The model-independent part of a start: device and kernel compiler."""

from __future__ import annotations

import logging
import os
import threading

import torch

from ...config import EngineConfig
from ...registry import Plugins

logger = logging.getLogger("jackfield.worker")


def separate_streams(config: EngineConfig) -> None:
    """Give a stage's streams separate work queues, before CUDA's context.

    By default streams share 8 queues (CUDA_DEVICE_MAX_CONNECTIONS), so a kernel that waits for
    another stage would block other streams.
    """
    if config.device == "cuda" and config.pipeline_parallel_size > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def initialize_device(config: EngineConfig, plugins: Plugins) -> None:
    """Never raises: the worker's start reports errors.

    `config`: with a concrete `device`. Also prepares the first possible operations.
    """
    if config.device != "cuda":
        return
    separate_streams(config)
    try:
        # Asking for the number initialises the device, which takes as long as what the thread does.
        number = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        device = torch.device("cuda", number)
        thread = threading.Thread(target=_ready_operations, args=(config, plugins, device))
        thread.start()
        try:
            torch.empty(1, device=device)
        finally:
            thread.join()
    except Exception:
        logger.debug("the device does not wake up", exc_info=True)


def _ready_operations(config: EngineConfig, plugins: Plugins, device: torch.device) -> None:
    try:
        registry = plugins["operations"]
        name = config.operations
        if name == "auto":
            name = registry.entries()[0].name
        registry.load(name).initialize_device(device)
    except Exception:
        logger.debug("operations cannot get ready ahead", exc_info=True)

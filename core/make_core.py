"""Chooses an engine's core: in this process, or several processes."""

from __future__ import annotations

from .config import EngineConfig
from .data_parallel.pooled_cores import PooledCores
from .engine.core import EngineCore
from .engine.core_client import ServedCore
from .registry import Plugins


def make_core(config: EngineConfig, plugins: Plugins) -> ServedCore:
    if config.data_parallel_size > 1:
        return PooledCores(config, plugins)
    return EngineCore(config, plugins)

"""Chooses the core of an engine: in this process, or several in processes of their own."""

from __future__ import annotations

from .config import EngineConfig
from .data_parallel.pooled_cores import PooledCores
from .engine.core import EngineCore
from .engine.core_client import ServedCore
from .registry import Plugins


def make_core(config: EngineConfig, plugins: Plugins) -> ServedCore:
    """Return a core that has not started."""
    if config.data_parallel_size > 1:
        return PooledCores(config, plugins)
    return EngineCore(config, plugins)

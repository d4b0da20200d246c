"""Chooses the executor, by its name or by the number of ranks. Imports nothing large."""

from __future__ import annotations

from ..config import EngineConfig
from ..errors import ConfigError, PluginError
from ..protocols.executors import Executor
from .registered import Registry


def choose_executor(config: EngineConfig, executors: Registry[type[Executor]]) -> str:
    """Return the registered name of the executor that `config.executor` names, by its own name or
    an alias; for `auto`, of the first by priority that runs as many ranks.

    Raises ConfigError if it cannot be loaded, or runs one rank where several are asked for.
    """
    name, num_ranks = executors.canonical(config.executor), config.num_ranks
    if name != "auto":
        try:
            executor = executors.load(name)
        except PluginError as error:
            raise ConfigError(f"executor: {error}", param="executor") from error
        if config.tensor_parallel_size > 1 and not executor.tensor_parallel:
            raise ConfigError(
                f"tensor_parallel_size: executor {name!r} runs one rank; set it to 1, or leave "
                "executor at auto",
                param="tensor_parallel_size",
            )
        if config.pipeline_parallel_size > 1 and not executor.pipeline_parallel:
            raise ConfigError(
                f"pipeline_parallel_size: executor {name!r} runs one stage; set it to 1, or leave "
                "executor at auto",
                param="pipeline_parallel_size",
            )
        return name
    reasons = []
    for entry in executors.entries():
        try:
            executor = executors.load(entry.name)
        except PluginError as error:
            reasons.append(str(error))
            continue
        if config.tensor_parallel_size > 1 and not executor.tensor_parallel:
            reasons.append(f"{entry.name}: it runs one rank")
        elif config.pipeline_parallel_size > 1 and not executor.pipeline_parallel:
            reasons.append(f"{entry.name}: it runs one stage")
        else:
            return entry.name
    raise ConfigError(
        f"executor: none runs {num_ranks} ranks (tensor_parallel_size, pipeline_parallel_size): "
        f"{'; '.join(reasons) or 'none is registered'}",
        param="executor",
    )

"""Chooses the executor, by its name or by what ranks are to do. Imports nothing large."""

from __future__ import annotations

from typing import NamedTuple

from ..config import EngineConfig
from ..errors import ConfigError, PluginError
from ..protocols.executors import Executor
from .registered import Registry


class MissingFeature(NamedTuple):
    """What an executor does not do, and a configuration asks for."""

    option: str
    reason: str
    """What it does instead, as the rest of a sentence about it."""


def choose_executor(config: EngineConfig, executors: Registry[type[Executor]]) -> str:
    """Return the registered name of the executor that `config.executor` names, by its own name or
    an alias; for `auto`, of the first by priority that does what the configuration asks of ranks.

    Raises ConfigError if it cannot be loaded, or does not do that.
    """
    name = executors.canonical(config.executor)
    if name != "auto":
        try:
            executor = executors.load(name)
        except PluginError as error:
            raise ConfigError(f"executor: {error}", param="executor") from error
        if (missing := _missing_feature(config, executor)) is not None:
            remedy = "set it to 1" if missing.option.endswith("_size") else "leave it out"
            raise ConfigError(
                f"{missing.option}: executor {name!r} {missing.reason}; {remedy}, or leave "
                "executor at auto",
                param=missing.option,
            )
        return name
    reasons = []
    for entry in executors.entries():
        try:
            missing = _missing_feature(config, executors.load(entry.name))
        except PluginError as error:
            reasons.append(str(error))
            continue
        if missing is None:
            return entry.name
        reasons.append(f"{entry.name}: it {missing.reason}")
    ranks = f"{config.num_ranks} ranks (tensor_parallel_size, pipeline_parallel_size)"
    raise ConfigError(
        f"executor: none serves {ranks} as asked: {'; '.join(reasons) or 'none is registered'}",
        param="executor",
    )


def _missing_feature(config: EngineConfig, executor: type[Executor]) -> MissingFeature | None:
    """Return the first thing that an executor does not do; None: it does all."""
    if config.tensor_parallel_size > 1 and not executor.tensor_parallel:
        return MissingFeature("tensor_parallel_size", "runs one rank")
    if config.pipeline_parallel_size > 1 and not executor.pipeline_parallel:
        return MissingFeature("pipeline_parallel_size", "runs one stage")
    if config.data_parallel_size > 1 and not executor.data_parallel:
        return MissingFeature("data_parallel_size", "does not share a host with other engines")
    if config.enable_eplb and not executor.moves_experts:
        return MissingFeature("enable_eplb", "does not move experts")
    return None

"""Chooses the executor, by name or ranks' needs. Imports nothing large."""

from __future__ import annotations

from typing import NamedTuple

from ..config import EngineConfig
from ..errors import ConfigError, PluginError
from ..protocols.executors import Executor
from .registered import Registry


class MissingFeature(NamedTuple):
    """A requested feature that an executor lacks."""

    option: str
    reason: str
    """Rest of a sentence about the executor."""


def choose_executor(config: EngineConfig, executors: Registry[type[Executor]]) -> str:
    """Return the registered executor of `config.executor` (name or alias), or for `auto` the first
    by priority with the ranks' features.

    Raises ConfigError.
    """
    name = executors.canonical(config.executor)
    if name != "auto":
        try:
            executor = executors.load(name)
        except PluginError as error:
            raise ConfigError(f"executor: {error}", param="executor") from error
        if (missing := _missing_feature(config, executor)) is not None:
            remedy = "leave it out" if missing.option.startswith("enable") else "set it to 1"
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
    """Return the first missing feature, or None."""
    if config.tensor_parallel_size > 1 and not executor.tensor_parallel:
        return MissingFeature("tensor_parallel_size", "runs one rank")
    if config.pipeline_parallel_size > 1 and not executor.pipeline_parallel:
        return MissingFeature("pipeline_parallel_size", "runs one stage")
    if config.divides_experts_among_engines and not executor.joins_engines:
        return MissingFeature(
            "enable_expert_parallel",
            "does not join the ranks of other engines (data_parallel_size)",
        )
    if config.data_parallel_size > 1 and not executor.data_parallel:
        return MissingFeature("data_parallel_size", "does not share a host with other engines")
    if config.nnodes > 1 and not executor.joins_hosts:
        return MissingFeature("nnodes", "does not join the hosts of others")
    if config.enable_eplb and not executor.moves_experts:
        return MissingFeature("enable_eplb", "does not move experts")
    return None

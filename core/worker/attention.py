"""Chooses the attention backend, and says why."""

from __future__ import annotations

import logging

import torch

from ..errors import ConfigError, PluginError
from ..protocols import AttentionBackend, AttentionSpec
from ..registry import Registry

logger = logging.getLogger("jackfield.worker")


def select_backend(
    registry: Registry[type[AttentionBackend]],
    name: str,
    specs: set[AttentionSpec],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[str, type[AttentionBackend], str]:
    """→ (name, class, reason). `auto` takes the first by priority that supports every layer.

    Raises ConfigError when the named one cannot serve this model here, or none can.
    """

    def refusal(backend: type[AttentionBackend]) -> str | None:
        for spec in specs:
            if (reason := backend.supports(spec, device, dtype)) is not None:
                return reason
        return None

    if name != "auto":
        try:
            backend = registry.load(name)
        except PluginError as error:
            raise ConfigError(f"attention_backend: {error}", param="attention_backend") from error
        if (reason := refusal(backend)) is not None:
            raise ConfigError(
                f"attention_backend: {name!r} cannot serve this model here: {reason}",
                param="attention_backend",
            )
        return name, backend, "chosen by name"
    reasons: list[str] = []
    for entry in registry.entries():
        try:
            backend = registry.load(entry.name)
            reason = refusal(backend)
        except PluginError as error:
            reason = str(error)
        if reason is None:
            why = f"because {'; '.join(reasons)}" if reasons else "first by priority"
            logger.info("attention: %s, %s", entry.name, why)
            return entry.name, backend, why
        reasons.append(f"{entry.name}: {reason}")
    raise ConfigError(
        f"attention_backend: no backend can serve this model on {device}: {'; '.join(reasons)}",
        param="attention_backend",
    )

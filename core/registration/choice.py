"""Chooses among plugins that may not work here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ..errors import ConfigError, PluginError
from .registered import Registry

logger = logging.getLogger("jackfield.worker")
T = TypeVar("T")


def choose(
    registry: Registry[T], field: str, name: str, refusal: Callable[[T], str | None]
) -> tuple[str, T, str]:
    """Return (name, object, reason). `field`: the option.

    `auto` takes the first by priority without a `refusal`. Raises ConfigError if none serves.
    """
    if name != "auto":
        try:
            backend_class = registry.load(name)
            name = registry.canonical(name)
            with registry.calling(name, "supports"):
                reason = refusal(backend_class)
        except PluginError as error:
            raise ConfigError(f"{field}: {error}", param=field) from error
        if reason is not None:
            raise ConfigError(
                f"{field}: {name!r} cannot serve this model here: {reason}", param=field
            )
        return name, backend_class, "chosen by name"
    reasons: list[str] = []
    for entry in registry.entries():
        try:
            backend_class = registry.load(entry.name)
            with registry.calling(entry.name, "supports"):
                reason = refusal(backend_class)
        except PluginError as error:
            reason = str(error)
        if reason is None:
            why = f"because {'; '.join(reasons)}" if reasons else "first by priority"
            logger.info("%s: %s, %s", field, entry.name, why)
            return entry.name, backend_class, why
        reasons.append(f"{entry.name}: {reason}")
    raise ConfigError(f"{field}: none can serve this model here: {'; '.join(reasons)}", param=field)

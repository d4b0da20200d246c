"""Which registered model serves a checkpoint's architecture."""

from __future__ import annotations

from typing import Any

from ..config import EngineConfig
from ..errors import ConfigError
from .registered import Registry

FALLBACK = "*"
"""Name of the model for other architectures; its class's `refusal(architecture)` returns a reason
against, or None."""


def registered_name(
    registry: Registry[Any], config: EngineConfig, name: str, model_type: str | None
) -> str:
    """Return the name for an architecture, by `EngineConfig.model_impl`.

    Raises ConfigError.
    """
    choice = config.model_impl
    if choice == "transformers":
        if (reason := _fallback_refusal(registry, name)) is None:
            return FALLBACK
        raise ConfigError(f"model_impl: 'transformers' cannot serve {name!r}: {reason}",
                          param="model_impl")  # fmt: skip
    if name in registry:
        return name
    reason, more = registry.refusal(name), ""
    if reason is None and choice == "auto":
        if (refusal := _fallback_refusal(registry, name)) is None:
            return FALLBACK
        more = f", and {refusal}"
    families = ", ".join(sorted(set(registry) - {FALLBACK}))
    reason_text = f" (there are: {families}){more}" if reason is None else f": {reason}"
    raise ConfigError(
        f"model: architecture {name!r} (model_type {model_type!r}) is not supported{reason_text}; "
        "Jackfield never runs code from a checkpoint: install a plugin that registers it",
        param="model",
    )


def _fallback_refusal(registry: Registry[Any], architecture: str) -> str | None:
    if FALLBACK not in registry:
        return "no plugin registers a fallback"
    refusal: str | None = registry.load(FALLBACK).refusal(architecture)
    return refusal

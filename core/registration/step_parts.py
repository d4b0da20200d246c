"""An engine's parts from plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..config import EngineConfig
from ..errors import ConfigError
from ..parts.part_types import PartTypes, SentTypes
from ..protocols.parts import PartSetup, StepPart
from .plugin_options import typed_options

if TYPE_CHECKING:
    from ..registry import Plugins

KIND = "part"
FIELD = "parts"


def active_parts(
    plugins: Plugins, config: EngineConfig
) -> dict[str, tuple[type[StepPart], PartSetup]]:
    """Return name → part and setup, in the order of `config.parts`. Raises ConfigError for an
    unknown name or option.
    """
    registry = plugins[KIND]
    active = {}
    for name, options in config.parts.items():
        if name not in registry:
            raise ConfigError(
                f"parts: none is registered as {name!r} "
                f"(there are: {', '.join(sorted(registry)) or 'none'})",
                param=FIELD,
            )
        part_class: type[StepPart] = registry.load(name)
        typed = typed_options(name, part_class.options, options, field=FIELD)
        active[name] = part_class, PartSetup(name, typed, config)
    return active


def excluded_by(plugins: Plugins, config: EngineConfig) -> Mapping[str, Mapping[str, str]]:
    parts = active_parts(plugins, config)
    return {name: part_class.excludes for name, (part_class, _) in parts.items()}


def part_types(plugins: Plugins, config: EngineConfig) -> PartTypes:
    return PartTypes({
        name: SentTypes(part.plan_type, part.result_type, part.start_type)
        for name, (part, _) in active_parts(plugins, config).items()
    })  # fmt: skip

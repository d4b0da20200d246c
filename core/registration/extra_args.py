"""`SamplingParams.extra_args`: which plugin reads each of them, and their validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..errors import ConfigError, InvalidRequest, shown
from ..protocols.logits_processors import LogitsProcessor
from ..protocols.parts import StepPart
from ..sampling_params import SamplingParams
from . import step_parts
from .registered import Registry

if TYPE_CHECKING:
    from ..registry import Plugins

KIND = "logits_processor"


def active_processors(plugins: Plugins, config: EngineConfig) -> list[str]:
    """Return the active processors in order."""
    registry = plugins[KIND]
    if config.logits_processors is None:
        return sorted(registry)
    for name in config.logits_processors:
        if name not in registry:
            raise ConfigError(
                f"logits_processors: none is registered as {name!r} "
                f"(there are: {', '.join(sorted(registry)) or 'none'})",
                param="logits_processors",
            )
    return list(dict.fromkeys(config.logits_processors))


class ExtraArgs:
    def __init__(self, plugins: Plugins, config: EngineConfig) -> None:
        processors, parts = plugins[KIND], plugins[step_parts.KIND]
        readers: list[tuple[Registry[Any], str, type[LogitsProcessor] | type[StepPart]]] = [
            (processors, name, processors.load(name)) for name in active_processors(plugins, config)
        ]
        for name, (part_class, _) in step_parts.active_parts(plugins, config).items():
            readers.append((parts, name, part_class))
        self._readers = readers

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidRequest; PluginError if a processor fails."""
        if not params.extra_args:
            return
        names = frozenset[str]().union(*(reader.parameters for _, _, reader in self._readers))
        for key in params.extra_args:
            if key not in names:
                raise InvalidRequest(
                    f"vllm_xargs: no active logits processor or part reads {shown(key)} "
                    f"(there are: {', '.join(sorted(names)) or 'none'})",
                    param="vllm_xargs",
                )
        for registry, name, reader in self._readers:
            if not reader.parameters.isdisjoint(params.extra_args):
                with registry.calling(name, "check"):
                    reader.check(params)

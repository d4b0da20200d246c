"""Parameters of plugged-in logits processors: which processor reads them, and their validation."""

from __future__ import annotations

from ..config import EngineConfig
from ..errors import ConfigError, InvalidRequest
from ..protocols.logits_processors import LogitsProcessor
from ..registry import Plugins
from ..sampling_params import SamplingParams

KIND = "logits_processor"


def active_processors(plugins: Plugins, config: EngineConfig) -> list[str]:
    """Return the names of the active processors, in the order in which they are applied."""
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
    """Checks `SamplingParams.extra_args`, on the event loop."""

    def __init__(self, plugins: Plugins, config: EngineConfig) -> None:
        self._registry = plugins[KIND]
        self._active: dict[str, type[LogitsProcessor]] = {
            name: self._registry.load(name) for name in active_processors(plugins, config)
        }

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidRequest; PluginError if a processor fails."""
        if not params.extra_args:
            return
        names = frozenset[str]().union(*(p.parameters for p in self._active.values()))
        for key in params.extra_args:
            if key not in names:
                raise InvalidRequest(
                    f"extra_args (vllm_xargs): no active logits processor reads {key!r} "
                    f"(there are: {', '.join(sorted(names)) or 'none'})",
                    param="extra_args",
                )
        for name, processor in self._active.items():
            if not processor.parameters.isdisjoint(params.extra_args):
                with self._registry.calling(name, "check"):
                    processor.check(params)

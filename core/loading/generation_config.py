"""generation_config.json: recommended sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..config import EngineConfig
from ..errors import ConfigError, InvalidRequest
from ..local_path import is_file, local_path
from ..sampling_params import SamplingParams
from .json_file import read_object

FILE = "generation_config.json"
NAMES = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
"""Its names → fields of SamplingParams."""


class SamplingDefaults(msgspec.Struct, frozen=True):
    values: dict[str, Any] = {}
    """Fields of SamplingParams except `max_tokens`."""
    max_tokens: int | None = None
    """Most tokens of a completion, whatever a request says; None: no limit."""

    def params(self) -> SamplingParams:
        """Parameters of a request without any."""
        return SamplingParams(**self.values, max_tokens=self.max_tokens)

    def limited(self, max_tokens: int | None) -> int | None:
        """Return the smaller of this and a request's limit."""
        limits = [limit for limit in (max_tokens, self.max_tokens) if limit is not None]
        return min(limits, default=None)


NO_DEFAULTS = SamplingDefaults()


def read_generation_config(folder: Path, config: EngineConfig) -> dict[str, Any]:
    """Read the model's file, or that in `generation_config`'s folder; {} without one.

    Raises ConfigError for a named folder without one, LoadError if unreadable.
    """
    if config.generation_config not in ("auto", "vllm"):
        folder = local_path(config.generation_config)
        if not is_file(folder / FILE):
            raise ConfigError(
                f"generation_config: must be 'auto', 'vllm' or a folder with {FILE}, got "
                f"{config.generation_config!r}",
                param="generation_config",
            )
    return read_object(folder / FILE) if (folder / FILE).is_file() else {}


def sampling_defaults(stored: Mapping[str, Any], config: EngineConfig) -> SamplingDefaults:
    """Return the defaults from the file (unless `generation_config` is "vllm") and
    `override_generation_config`. Raises ConfigError with the field's name.
    """
    own = _named(stored if config.generation_config != "vllm" else {}, FILE, "generation_config")
    override = config.override_generation_config or {}
    for name in override:
        if name not in NAMES:
            raise ConfigError(
                f"override_generation_config.{name}: is not supported (there are: "
                f"{', '.join(NAMES)})",
                param="override_generation_config",
            )
    field = "override_generation_config"
    values = own | _named(override, field, field)
    limit = values.pop("max_tokens", None)
    return SamplingDefaults(values, limit)


def _named(values: Mapping[str, Any], source: str, param: str) -> dict[str, Any]:
    """Return validated values under SamplingParams' names."""
    params = {NAMES[name]: value for name, value in values.items() if name in NAMES}
    params = {name: value for name, value in params.items() if value is not None}
    try:
        SamplingParams(**params)
    except InvalidRequest as error:
        hint = "; --generation-config vllm does without the file" if source == FILE else ""
        raise ConfigError(f"{source}: {error.message}{hint}", param=param) from error
    return params

"""Options of plugins, validated against each plugin's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import ConfigError
from .plugin_checks import near

FIELD = "plugin_options"


def typed_options(
    name: str, schema: type[msgspec.Struct], value: Any, *, field: str = FIELD
) -> msgspec.Struct:
    """Return `schema`'s instance, with defaults. Raises ConfigError naming the option in
    `field.name`, or in the field if name is "".
    """
    param = f"{field}.{name}" if name else field
    if not isinstance(value, Mapping):
        raise ConfigError(f"{param}: must be an object of options, got {value!r}", param=param)
    names = {field.encode_name for field in msgspec.structs.fields(schema)}
    for key in value:
        if key not in names:
            raise ConfigError(
                f"{param}.{key}: no such option{near(str(key), names)} (there are: "
                f"{', '.join(sorted(names)) or 'none'})",
                param=f"{param}.{key}",
            )
    try:
        return msgspec.convert(dict(value), schema)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{param}: {error} (got {value!r})", param=param) from None


def parsed_option(text: str) -> tuple[str, list[str], Any]:
    """Parse `NAME.key=value` into (name, keys, value), value as JSON or text.

    Raises ConfigError.
    """
    path, equals, value = text.partition("=")
    name, *keys = path.split(".")
    if not equals or not name or not keys or not all(keys):
        raise ConfigError(f"plugin_option: {text!r} is not NAME.key=value", param="plugin_option")
    try:
        return name, keys, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, keys, value


def with_option(options: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return `options` plus `NAME.key=value`. Raises ConfigError."""
    name, keys, value = parsed_option(text)
    merged = dict(options)
    inner = merged
    for key in (name, *keys[:-1]):
        below = inner.get(key, {})
        if not isinstance(below, Mapping):
            raise ConfigError(
                f"plugin_option: {text!r}: {key} is no object of options", param="plugin_option"
            )
        inner[key] = dict(below)
        inner = inner[key]
    inner[keys[-1]] = value
    return merged

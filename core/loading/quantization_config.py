"""Reads a checkpoint's `quantization_config`: typed, with the field's name in errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, listed, shown
from ..nn.quantized import LinearSpec


class ConfigReader:
    """A mapping whose values are checked as they are read.

    Every method raises ConfigError with the field's full name; a field that is missing or null
    has the default.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "quantization_config") -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{name}: must be an object, got {values!r}", param=name)
        self.values = values
        self.name = name

    def refuse(self, field: str, expected: str) -> ConfigError:
        """Return the error for a field whose value is not `wanted`."""
        name = f"{self.name}.{field}"
        return ConfigError(
            f"{name}: must be {expected}, got {self.values.get(field)!r}", param=name
        )

    def choice(self, field: str, allowed: Sequence[Any], default: Any) -> Any:
        """Read one of `allowed`."""
        value = self._get(field, default)
        if not any(
            value == choice and type(value) is type(choice) for choice in [*allowed, default]
        ):
            raise self.refuse(field, " or ".join(repr(choice) for choice in allowed))
        return value

    def flag(self, field: str, default: bool) -> bool:
        """Read true or false."""
        return bool(self.choice(field, (True, False), default))

    def integer(self, field: str, default: int, *, least: int = 1) -> int:
        """Read an integer of at least `least`."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(field, f"an integer of at least {least}")
        return value

    def names(self, *fields: str) -> tuple[str, ...]:
        """Read the lists of names of all `fields`, joined."""
        names: list[str] = []
        for field in fields:
            value = self._get(field, [])
            if not isinstance(value, list | tuple) or any(not isinstance(v, str) for v in value):
                raise self.refuse(field, "a list of names")
            for name in value:
                self._check_pattern(field, name)
            names.extend(value)
        return tuple(names)

    def _check_pattern(self, field: str, name: str) -> None:
        try:
            if name.startswith("re:"):
                re.compile(name.removeprefix("re:"))
        except re.error as error:
            full = f"{self.name}.{field}"
            raise ConfigError(
                f"{full}: {shown(name)} is no regular expression: {error}", param=full
            ) from error

    def inner(self, field: str) -> ConfigReader | None:
        """Read an object; None if there is none."""
        value = self._get(field, None)
        return None if value is None else ConfigReader(value, f"{self.name}.{field}")

    def _get(self, field: str, default: Any) -> Any:
        value = self.values.get(field)
        return default if value is None else value


def name_matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a layer's name: the whole name, whole dotted parts
    ("lm_head", "self_attn.q_proj", "model.layers.0"), or after "re:" a regular expression from the
    start.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}."


def is_ignored(spec: LinearSpec, patterns: Iterable[str], field: str) -> bool:
    """Return whether a checkpoint's list of layers to leave alone (`field`) names this one.

    Raises ConfigError where it names some shards of a merged layer and not others.
    """
    patterns = tuple(patterns)
    matches = {
        source: any(name_matches(source, pattern) for pattern in patterns)
        for source in spec.sources.values()
    }
    if any(matches.values()) and not all(matches.values()):
        (some, others) = (
            [n for n, hit in matches.items() if hit is ignored] for ignored in (True, False)
        )
        raise ConfigError(
            f"quantization_config.{field}: names {listed(some, 4)} but not {listed(others, 4)}, "
            "which are computed as one layer",
            param=f"quantization_config.{field}",
        )
    return all(matches.values())

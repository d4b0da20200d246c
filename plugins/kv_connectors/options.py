"""A connector's own options, checked by name."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ...core.errors import ConfigError

T = TypeVar("T")


def read_options(options: dict[str, Any], kind: type[T]) -> T:
    """`kv_connector_extra_config` as a struct. Raises ConfigError naming the faulty option."""
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config: {error} (got {options!r})", param="kv_transfer_config"
        ) from None

"""Constructors of blocks and decoders as in version 2 of the hook API: with the fields of
`BlockParts` one by one, and the layer after the configuration. They work for one version more.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ...core.old_names import warn

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])


def create(kind: Callable[..., T], parts: Any, *layer: int) -> T:
    """Create a block or decoder of `parts`, by either constructor."""
    if "config" not in inspect.signature(kind).parameters:
        return kind(parts, *layer)
    _warn(kind, with_layer=bool(layer))
    config, *more = parts
    return kind(config, *layer, *more)


def of_fields(parts_type: Callable[..., Any], *, with_layer: bool) -> Callable[[F], F]:
    """Let the constructor of a base class also take the fields, which subclasses of version 2 pass
    on."""
    names = _names(with_layer)

    def decorate(init: F) -> F:
        @functools.wraps(init)
        def either(self: object, *args: Any, **kwargs: Any) -> None:
            if len(args) + len(kwargs) < len(names):
                return init(self, *args, **kwargs)
            _warn(type(self), with_layer=with_layer)
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            layer = [given.pop("layer")] if with_layer else []
            return init(self, parts_type(**given), *layer)

        return cast(F, either)

    return decorate


def _names(with_layer: bool) -> tuple[str, ...]:
    return ("config", *(("layer",) if with_layer else ()), "build", "attention", "mlp")


def _warn(kind: Callable[..., Any], *, with_layer: bool) -> None:
    new = "parts, layer" if with_layer else "parts"
    name = kind.__qualname__
    warn(f"{name}({', '.join(_names(with_layer))})", f"{name}({new})", stacklevel=4)

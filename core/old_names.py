"""Names of the last version of the hook API, which work for one version more.

Each use of one gives a DeprecationWarning that has the new name; docs/reference/api-versions.md
lists them.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def module_getattr(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose names have changed: old name → "module.name", the
    module as in `jackfield.core.errors`."""

    def getattr_of_module(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", renamed[name], stacklevel=3)
        path, _, new_name = renamed[name].rpartition(".")
        return getattr(importlib.import_module(path), new_name)

    return getattr_of_module


class RenamedMethod:
    """A method's old name in the class that defines the method.

    Subclasses may still be called by it, and override it: `adopt_overrides`.
    """

    def __init__(self, new_name: str) -> None:
        self.new_name = new_name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> Any:
        warn(self.name, self.new_name, stacklevel=3)
        # Where a class overrides the old name, super() of the last one is what gets here.
        overriding = [i for i, base in enumerate(owner.__mro__) if self._is_overridden(base)]
        for base in owner.__mro__[overriding[-1] + 1 if overriding else 0 :]:
            if method := vars(base).get(self.new_name):
                return method if instance is None else method.__get__(instance, owner)
        raise AttributeError(self.name)

    def _is_overridden(self, subclass: type) -> bool:
        return vars(subclass).get(self.name, self) is not self


def adopt_overrides(subclass: type) -> None:
    """Give a subclass's overrides of methods by their old names the new ones, too."""
    renamed = {
        name: value
        for base in subclass.__mro__
        for name, value in vars(base).items()
        if isinstance(value, RenamedMethod)
    }
    for name, method in renamed.items():
        override = vars(subclass).get(name, method)
        if override is not method:
            warn(f"{subclass.__qualname__}.{name}", method.new_name, stacklevel=4)
            setattr(subclass, method.new_name, override)


def warn(old: str, new: str, *, stacklevel: int) -> None:
    """Say that a name has changed; `stacklevel` as seen from here."""
    warnings.warn(
        f"{old} is now {new}; the old name goes with the next version of the hook API",
        DeprecationWarning,
        stacklevel=stacklevel,
    )

"""The contracts of adapter formats and resolvers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from ..adapters.file import AdapterFile
    from ..config import EngineConfig


class AdapterFormat(Protocol):
    """A form in which adapters are stored."""

    name: ClassVar[str]

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Return whether an adapter of this form is there, by the names of files alone. path: a
        folder or a file."""

    @classmethod
    def read(cls, path: Path) -> AdapterFile:
        """Read what the adapter changes; tensors when they are asked for. On a thread, may take
        long. Never runs code from a file.

        Every field and tensor is used, does not change results, or is refused. Raises ConfigError
        with the field's name as `param`.
        """


class AdapterResolver(Protocol):
    """Finds adapters whose names are not loaded. Created once per engine, when the first
    such name is asked for."""

    def __init__(self, config: EngineConfig) -> None: ...

    async def resolve(self, name: str, base_model: str) -> Path | None:
        """Return where the adapter of this name is on this machine; None: this resolver knows no
        such adapter. `name` comes from a client and may be anything. Several calls may run at
        once."""

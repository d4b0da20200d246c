"""jackfield.json: the formats in which a checkpoint's model writes calls and reasoning."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..errors import ConfigError
from .json_file import read_object

FILE = "jackfield.json"


class Dialects(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of jackfield.json."""

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    calls_without_tools: bool = False
    """Whether the model calls tools also where a request offers none: its calls are parsed then,
    too, instead of shown as text."""


NO_DIALECTS = Dialects()


def read_dialects(folder: Path) -> Dialects:
    """Read a checkpoint's jackfield.json; what it does not say is None. Raises ConfigError,
    LoadError."""
    path = folder / FILE
    if not path.is_file():
        return NO_DIALECTS
    try:
        return msgspec.convert(read_object(path), Dialects)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model: {path}: {error}", param="model") from None

"""jackfield.json: a checkpoint's formats of calls and reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..registry import Entry, Registry
from .json_file import read_object

FILE = "jackfield.json"


class Dialects(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    calls_without_tools: bool = False
    """Whether the model calls tools without an offer; such calls are parsed."""


NO_DIALECTS = Dialects()


def read_dialects(folder: Path) -> Dialects:
    """Read jackfield.json; missing values are None. Raises ConfigError, LoadError."""
    path = folder / FILE
    if not path.is_file():
        return NO_DIALECTS
    try:
        return msgspec.convert(read_object(path), Dialects)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model: {path}: {error}", param="model") from None


def recognized(registry: Registry[Any], model_type: str | None, template: str) -> str | None:
    """Return the parser whose marks are all in a chat template, or None.

    This model type's parsers come first, then longer marks.
    """
    fitting = [
        (
            bool(entry.parser_marks.model_types) and marks == entry.parser_marks.marks,
            sum(map(len, marks)),
            entry.name,
        )
        for entry in registry.entries()
        if (marks := marks_in(entry, model_type, template))
    ]
    return max(fitting)[2] if fitting else None


def marks_in(entry: Entry, model_type: str | None, template: str) -> tuple[str, ...]:
    """Return a parser's marks in a chat template, or ()."""
    of_type = not entry.parser_marks.model_types or model_type in entry.parser_marks.model_types
    for marks, counts in (
        (entry.parser_marks.marks, of_type),
        (entry.parser_marks.other_marks, True),
    ):
        if marks and counts and all(mark in template for mark in marks):
            return marks
    return ()


def declared_parser(registry: Registry[Any], tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return the parser of tokenizer_config.json's declaration, or None."""
    for entry in registry.entries():
        if (
            entry.parser_marks.declaration
            and tokenizer_config.get(entry.parser_marks.declaration) is not None
        ):
            return entry.name
    return None

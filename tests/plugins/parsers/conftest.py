"""What is asked of every family's parser, and what once of each mechanism that families share."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.plugins.conformance.parsers import ParserKit

MECHANISMS = "jackfield.plugins.parsing"
ONCE_FOR_A_MECHANISM = (
    "test_a_megabyte_takes_linear_time",
    "test_tiny_pieces_take_linear_time",
    "test_a_piece_costs_the_same_however_much_came_before",
)
"""How long a text takes: families differ in marks, and time is spent where they are looked for."""
ONCE_FOR_A_PARSER = ("test_forced_calls_are_read_back", "test_no_call_escapes_a_strict_grammar")
"""Outputs that do not depend on a family's samples; some names stand for the same parser."""


def mechanism(parser: Any) -> type:
    """The class of `plugins/parsing` that a parser is made of."""
    return next((base for base in parser.__mro__ if base.__module__.startswith(MECHANISMS)), parser)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is asked a second time as slow."""
    seen: dict[tuple[str, Any], Any] = {}
    for item in items:
        kit, name = getattr(item, "cls", None), item.name
        if kit is None or not issubclass(kit, ParserKit):
            continue
        if name in ONCE_FOR_A_MECHANISM:
            about = mechanism(kit.registered())
        elif name in ONCE_FOR_A_PARSER:
            about = kit.registered()
        else:
            continue
        if seen.setdefault((name, about), kit) is not kit:
            item.add_marker(pytest.mark.slow)

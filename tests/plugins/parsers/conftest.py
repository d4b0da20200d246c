"""What is asked of every family's parser, and what once of each mechanism that families share."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.plugins.conformance.parsers import ParserKit

MECHANISMS = "jackfield.plugins.parsing"
ONCE_FOR_A_MECHANISM = (
    "test_tiny_pieces_take_linear_time",
    "test_marks_in_any_order_give_the_same_fold",
    "test_no_call_escapes_a_strict_grammar",
)
"""How long a text takes, what marks mean where none is expected, and what gets through a grammar:
families differ in marks, and time is spent, and calls escape, where they are looked for."""
BY_NIGHT = (
    "test_a_megabyte_takes_linear_time", "test_a_piece_costs_the_same_however_much_came_before",
)  # fmt: skip
"""Time that would grow with the text grows with tiny pieces, too, which are tried by day."""
ONCE_FOR_A_PARSER = ("test_forced_calls_are_read_back", "test_no_text_makes_it_raise")
"""Outputs that do not depend on a family's samples; some names stand for the same parser."""
WHEREVER_A_SAMPLE_BREAKS_OFF = (
    "test_a_sample_cut_anywhere_means_the_same", "test_a_sample_may_end_anywhere",
    "test_arguments_are_strict_json",
)  # fmt: skip
"""Their time grows with the square of a sample's length. Families that write the same calls with
other marks have long samples of much the same length: one of each hundred characters is enough,
besides every family's samples that are not long."""
LONG = 100
"""Characters of a long sample."""
BY_DAY = 6
"""Random texts for each property of a parser, at most."""


def mechanism(parser: Any) -> type:
    """The class of `plugins/parsing` that a parser is made of, or its own first base."""
    bases = parser.__mro__
    return next((base for base in bases if base.__module__.startswith(MECHANISMS)), bases[-2])


def _repeated(kit: Any) -> bool:
    """Whether the kit is a class's for another name of the same parser, with the same samples."""
    base = kit.__mro__[1]
    return bool(
        "name" in vars(base)
        and base.registered() is kit.registered()
        and base.samples is kit.samples
    )


def _length(item: Any) -> int:
    """Characters of the sample that a test is about."""
    return len(item.callspec.params["sample"].text)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is asked a second time as slow, and draw fewer texts where the slow are left
    out."""
    few = "not slow" in config.option.markexpr
    seen: dict[tuple[str, Any], Any] = {}
    kit: Any
    for item in items:
        kit, name = getattr(item, "cls", None), item.name.partition("[")[0]
        if kit is None or not issubclass(kit, ParserKit):
            continue
        if few:
            kit.examples = min(kit.examples, BY_DAY)
        if _repeated(kit) or name in BY_NIGHT:
            item.add_marker(pytest.mark.slow)
            continue
        if name in ONCE_FOR_A_MECHANISM:
            about = mechanism(kit.registered())
        elif name in ONCE_FOR_A_PARSER:
            about = kit.registered()
        elif name in WHEREVER_A_SAMPLE_BREAKS_OFF and (length := _length(item)) > LONG:
            kit, about = item, (mechanism(kit.registered()), length // 100)
        else:
            continue
        if seen.setdefault((name, about), kit) is not kit:
            item.add_marker(pytest.mark.slow)

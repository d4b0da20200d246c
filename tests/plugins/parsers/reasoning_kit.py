"""The kit that every reasoning parser in the box passes."""

from __future__ import annotations

from jackfield.plugins.conformance.parsers import ReasoningParserKit


class Kit(ReasoningParserKit):
    """Nearly all of them are one mechanism with other marks, so each is tried with fewer texts."""

    examples = 25

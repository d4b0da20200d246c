"""Follows a JSON text as it arrives: where strings, objects and arrays begin and end.

One pass, one state: linear in the text, and the same for any cutting of it.
"""

from __future__ import annotations


class JsonScanner:
    """Feed characters; `depth` and `done` tell where the text stands.

    It checks nesting and strings, not the whole grammar: a model's output is judged by parsing it
    once it is complete.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.done = False
        """The outermost object or array has closed."""
        self._escaped = False

    def feed(self, character: str) -> None:
        """Take one character."""
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self.in_string = False
        elif character == '"':
            self.in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
            self.done = self.depth <= 0

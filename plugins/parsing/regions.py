"""Divides an output into the regions of a response template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from .regex_search import Match, Pattern, Search, pattern_set
from .response_template import Field


class RegionHandler(Protocol):
    """Receives regions in text order."""

    def open_region(self, field: Field, mark: str, groups: Mapping[str, str]) -> None:
        """A region begins; `mark`: its opening text."""

    def add_text(self, field: Field | None, text: str) -> None:
        """Text of a region; field None: outside of regions."""

    def closing(self, field: Field) -> None:
        """The closing mark has certainly begun; its end may be unknown."""

    def close_region(self, field: Field, mark: str | None, groups: Mapping[str, str]) -> None:
        """A region ends; mark None: with the text."""


class RegionReader:
    """Reads regions, in time linear in the text."""

    def __init__(self, fields: tuple[Field, ...], handler: RegionHandler) -> None:
        self._handler = handler
        self._rest = next((field for field in fields if field.open is None), None)
        opened = [field for field in fields if field.open is not None]
        self._openers = [(field, True) for field in opened]
        if self._rest is not None and self._rest.close is not None:
            self._openers.append((self._rest, False))
        self._field: Field | None = None
        """Field of the open region, or None."""
        self._text = ""
        """Text that may belong to a mark, then the current piece."""
        self._offset = self._done = 0
        """Positions of the text's first character, and of the first one not passed on."""
        self._watched: list[tuple[Field, bool]] = []
        self._search = Search(pattern_set())
        self._watch(0)

    def feed(self, text: str) -> None:
        self._text, self._offset = self._text[self._done - self._offset :] + text, self._done
        while (match := self._search.read(self._text, self._offset)) is not None:
            self._take(match)
        certain = self._search.certain
        if certain is not None and not self._watched[certain][1]:
            self._handler.closing(self._watched[certain][0])
        self._hand_on(self._search.pending)

    def finish(self) -> None:
        while (match := self._search.finish()) is not None:
            self._take(match)
            while (match := self._search.read(self._text, self._offset)) is not None:
                self._take(match)
        self._hand_on(self._offset + len(self._text))
        if self._field is not None:
            self._handler.close_region(self._field, None, {})

    def _watch(self, position: int) -> None:
        """Search for the mark that closes the region, or opens one."""
        if self._field is None:
            self._watched = self._openers
        else:
            self._watched = [] if self._field.close is None else [(self._field, False)]
        self._search = Search(
            pattern_set(*(_pattern(*watched) for watched in self._watched)), position
        )

    def _take(self, match: Match) -> None:
        self._hand_on(match.start)
        groups = {name: self._between(*span) for name, span in match.groups.items()}
        mark, self._done = self._between(match.start, match.end), match.end
        field, opens = self._watched[match.pattern]
        self._field = field if opens else None
        if opens:
            self._handler.open_region(field, mark, groups)
        else:
            self._handler.close_region(field, mark, groups)
        self._watch(match.end)

    def _between(self, start: int, end: int) -> str:
        return self._text[start - self._offset : end - self._offset]

    def _hand_on(self, position: int) -> None:
        if position > self._done:
            self._handler.add_text(self._field or self._rest, self._between(self._done, position))
            self._done = position


def _pattern(field: Field, opens: bool) -> Pattern:
    mark = field.open if opens else field.close
    assert mark is not None
    return mark.pattern

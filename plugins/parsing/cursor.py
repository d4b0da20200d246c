"""Reads text that arrives in pieces, with generators that yield where they need more text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import ClassVar, TypeAlias, TypeVar

from ...core.output_parsing.events import merge_events
from ...core.protocols.parsers import ParserEvent
from .json_scanner import JsonScanner, Status

T = TypeVar("T")
Read: TypeAlias = Generator[None, None, T]
"""Runs until it has read a T; yields if it needs more text, or the end of the text."""
EmitText: TypeAlias = Callable[[str], object]

SPACE = " \t\r\n"
SPACES = re.compile(f"[{SPACE}]+")
"""A run of JSON whitespace."""
MAX_JUNK = 64
"""Most characters dropped between a call and its closing mark, as a model's error."""
_CONTROLS = re.compile("[\x00-\x1f]+")
_MAX_STRING = 512
"""Most characters after a mark in a string to search for the string's end."""
_STRINGS = {quote: re.compile(rf"(?:[^{quote}\\]|\\.){{0,{_MAX_STRING}}}", re.S) for quote in "\"'"}
"""Quote → the inside of a string, up to the search limit."""
_LITTLE_SPACE = re.compile(f"[{SPACE}]{{0,{MAX_JUNK}}}")


def whole_characters(text: str) -> str:
    """Join surrogate pairs, which JSON's escapes may leave, and replace lone halves by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Marks:
    """Literal texts to search for. None of them may begin another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts = tuple(dict.fromkeys(text for text in texts if text))
        for text in texts:
            if any(other != text and other.startswith(text) for other in texts):
                raise ValueError(f"marks: {text!r} begins another mark")
        self.pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self.longest = max(map(len, texts), default=0)
        self._beginnings = {text[:size] for text in texts for size in range(1, len(text))}
        self._first = {text[0] for text in texts}
        self.first = re.compile("|".join(map(re.escape, self._first)) or "(?!)")
        """Matches a character that some mark begins with."""

    def begin(self, text: str, position: int) -> bool:
        """Return whether the text from `position` on, possibly empty, is the beginning of a
        mark."""
        size = len(text) - position
        return (
            bool(self.texts)
            if not size
            else (size < self.longest and text[position:] in self._beginnings)
        )

    def tail(self, text: str, position: int) -> int:
        """Return where, from `position`, a tail begins that may become a mark; len(text) if there
        is none."""
        for at in range(max(position, len(text) - self.longest + 1), len(text)):
            if text[at] in self._first and text[at:] in self._beginnings:
                return at
        return len(text)


class Cursor:
    """A position in a growing text; text before it is dropped."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._found: dict[re.Pattern[str], tuple[int, re.Match[str] | None]] = {}
        """Pattern → position searched from, and the match."""
        self.over = False
        """Whether the text is complete."""
        self.passing: tuple[re.Pattern[str], EmitText] | None = None
        """Set while `until` waits with all text passed on: a piece without a match may go to `emit`
        directly."""

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0
        self._found.clear()

    def end(self) -> None:
        self.over = True

    def until(self, marks: Marks, emit: EmitText) -> Read[str]:
        """Pass text to `emit` up to the first mark; consume and return that, or "" at the end."""
        while True:
            match = marks.pattern.search(self._text, self._at)
            # No tail is as long as a mark, so none begins before one that stands far enough in.
            far_in = match is not None and match.start() <= len(self._text) - marks.longest
            is_final = self.over or far_in
            safe_end = len(self._text) if is_final else marks.tail(self._text, self._at)
            if match is not None and match.start() < safe_end:
                self._hand_on(match.start(), emit)
                self._at = match.end()
                return match[0]
            self._hand_on(safe_end, emit)
            if self.over:
                return ""
            if safe_end == len(self._text):
                self.passing = marks.first, emit
            yield
            self.passing = None

    def until_within(self, marks: Marks, limit: int) -> Read[tuple[str, str] | None]:
        """Consume and return the text before the first mark, and the mark.

        None, and nothing consumed, if no mark ends within `limit` characters and its own length.
        """
        window = limit + marks.longest
        while True:
            match = marks.pattern.search(self._text, self._at, self._at + window)
            if match is not None:
                before = self._text[self._at : match.start()]
                self._at = match.end()
                return before, match[0]
            if self.over or len(self._text) - self._at >= window:
                return None
            yield

    def accept(self, marks: Marks) -> Read[str]:
        """Consume and return the mark at the position; "" if there is none."""
        while True:
            match = marks.pattern.match(self._text, self._at)
            if match is not None:
                self._at = match.end()
                return match[0]
            if self.over or not marks.begin(self._text, self._at):
                return ""
            yield

    def back(self, text: str) -> None:
        """Return `text`, which was just consumed without a yield since, to the input."""
        self._at -= len(text)

    def skip(self, size: int) -> None:
        """Consume characters that have arrived."""
        self._at += size

    @property
    def here(self) -> str:
        """The next character, or "" if none has arrived."""
        return self._text[self._at : self._at + 1]

    def peek(self) -> Read[str]:
        """Return the next character; "" at the end."""
        while self._at >= len(self._text):
            if self.over:
                return ""
            yield
        return self._text[self._at]

    def ahead(self, size: int) -> str:
        """Return up to `size` characters that have arrived, without consuming them."""
        return self._text[self._at : self._at + size]

    def rest(self) -> str:
        """Return the text that has arrived and is not consumed."""
        return self._text[self._at :]

    def run(self, pattern: re.Pattern[str]) -> Read[str]:
        """Consume a run of characters; `pattern` matches one or more of a class."""
        parts: list[str] = []
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None:
                parts.append(match[0])
                self._at = match.end()
            if self._at < len(self._text) or self.over:
                return "".join(parts)
            yield

    def json(
        self, emit: EmitText, emit_mended: EmitText | None = None, ends: Marks | None = None
    ) -> Read[Status]:
        """Consume the JSON value at the position, up to its end ("done"), to where it is invalid
        ("bad"), or to the end of the text ("more"). Marks of `ends` are invalid, even in a string,
        unless the string continues to its end.

        `emit` gets its source, `emit_mended` the same with raw control characters in strings
        escaped.
        """
        scanner = JsonScanner()
        while True:
            mark = self._next(ends.pattern, self._at) if ends else None
            stop = len(self._text) if mark is None else mark.start()
            if ends and mark is None and not self.over:
                stop = ends.tail(self._text, self._at)
            status = self._json(scanner, emit, emit_mended, stop)
            if status != "more":
                return status
            if ends and mark:
                if not scanner.in_string or not (yield from self.string_goes_on(len(mark[0]))):
                    return "bad"
                self._json(scanner, emit, emit_mended, self._at + len(mark[0]))
            elif self.over:
                return status
            else:
                yield

    def string_goes_on(self, size: int, quote: str = '"', after: str = ",:]}") -> Read[bool]:
        """Return whether a string that contains the next `size` characters continues to its closing
        quote and a character of `after`.
        """
        while True:
            at = _STRINGS[quote].match(self._text, self._at + size).end()  # type: ignore[union-attr]
            if at - self._at - size >= _MAX_STRING:
                return True
            if self._text[at : at + 1] == quote:
                at = _LITTLE_SPACE.match(self._text, at + 1).end()  # type: ignore[union-attr]
                if at < len(self._text):
                    return self._text[at] in after
            if self.over:
                return False
            yield

    def _json(
        self, scanner: JsonScanner, emit: EmitText, emit_mended: EmitText | None, limit: int
    ) -> Status:
        status: Status = "more"
        while status == "more" and self._at < limit:
            begin = self._at
            controls = self._next(_CONTROLS, begin) if emit_mended else None
            if controls is not None and controls.start() >= limit:
                controls = None
            stop = limit if controls is None else controls.start()
            status, self._at = scanner.scan(self._text, begin, stop)
            escape = False
            if status == "more" and controls is not None:
                escape = scanner.in_string
                status, self._at = scanner.scan(self._text, stop, min(controls.end(), limit))
            emit(self._text[begin : self._at])
            if emit_mended:
                emit_mended(self._text[begin : stop if escape else self._at])
                if escape and controls is not None:
                    emit_mended(json.dumps(self._text[stop : self._at])[1:-1])
        return status

    def _next(self, pattern: re.Pattern[str], position: int) -> re.Match[str] | None:
        """Return the first match from `position`; each pattern searches a position only once."""
        begin, match = self._found.get(pattern, (len(self._text) + 1, None))
        if begin > position or (match is not None and match.start() < position):
            match = pattern.search(self._text, position)
            self._found[pattern] = position, match
        return match

    def _hand_on(self, end: int, emit: EmitText) -> None:
        if end > self._at:
            emit(self._text[self._at : end])
            self._at = end


def run_through(reading: Read[T]) -> T:
    while True:
        try:
            next(reading)
        except StopIteration as stop:
            result: T = stop.value
            return result


class StreamingParser:
    """Runs a generator, `read`, that appends to `events`."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Marks that some tokenizers of the family hold as special tokens."""

    def __init__(self) -> None:
        self.text = Cursor()
        self.events: list[ParserEvent] = []
        self._reading = self.read()

    def read(self) -> Read[None]:
        raise NotImplementedError

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        passing = self.text.passing
        if passing is not None and passing[0].search(text) is None:
            # Fast path for most pieces: the generator does the same in twice the time.
            if text:
                passing[1](text)
            return self._take_events()
        self.text.add(text)
        return self._go_on()

    def finish(self) -> list[ParserEvent]:
        self.text.end()
        return self._go_on()

    def _go_on(self) -> list[ParserEvent]:
        next(self._reading, None)
        return self._take_events()

    def _take_events(self) -> list[ParserEvent]:
        events = merge_events(self.events[:])
        self.events.clear()
        return events

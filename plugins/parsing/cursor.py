"""Reads text that arrives in pieces, by generators that wait for more where they cannot decide."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import ClassVar, TypeAlias, TypeVar

from ...core.protocols import Content, ParserEvent, Reasoning, ToolCallArguments
from .json_scanner import JsonScanner, Status

T = TypeVar("T")
Read: TypeAlias = Generator[None, None, T]
"""Runs until it has read a T; yields where it needs more text, or to hear that there is none."""
Say: TypeAlias = Callable[[str], object]

SPACE = " \t\r\n"
SPACES = re.compile(f"[{SPACE}]+")
"""A run of what JSON takes for space."""
MAX_JUNK = 64
"""Characters between a call and its closing mark that are taken for a slip and dropped."""
_CONTROLS = re.compile("[\x00-\x1f]+")
_MAX_STRING = 512
"""Characters after a mark inside a string that are looked through for the string's end."""
_STRING = re.compile(rf'(?:[^"\\]|\\.){{0,{_MAX_STRING}}}', re.S)
_LITTLE_SPACE = re.compile(f"[{SPACE}]{{0,{MAX_JUNK}}}")


class Marks:
    """Literal texts to look for. None of them may begin another."""

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
        """Whether what `text` has from `position`, if anything, is the beginning of a mark."""
        size = len(text) - position
        return (
            bool(self.texts)
            if not size
            else (size < self.longest and text[position:] in self._beginnings)
        )

    def tail(self, text: str, position: int) -> int:
        """Where, from `position`, a tail begins that may become a mark; len(text) if nowhere."""
        for at in range(max(position, len(text) - self.longest + 1), len(text)):
            if text[at] in self._first and text[at:] in self._beginnings:
                return at
        return len(text)


class Cursor:
    """A place in a growing text. What is behind it is forgotten."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._found: dict[re.Pattern[str], tuple[int, re.Match[str] | None]] = {}
        """Pattern → where in the text it was looked for from, and what was found."""
        self.over = False
        """Whether the text has ended: nothing follows what is here."""
        self.passing: tuple[re.Pattern[str], Say] | None = None
        """While `until` waits with all text handed on: a piece in which the pattern finds nothing
        may go to `say` as it is."""

    def add(self, text: str) -> None:
        """The next piece."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self._found.clear()

    def end(self) -> None:
        """There are no more pieces."""
        self.over = True

    def until(self, marks: Marks, say: Say) -> Read[str]:
        """Hand text to `say` up to the first mark; consume and return that, or "" at the end."""
        while True:
            found = marks.pattern.search(self._text, self._at)
            # No tail is as long as a mark, so none begins before one that stands far enough in.
            far_in = found is not None and found.start() <= len(self._text) - marks.longest
            end = self.over or far_in
            held = len(self._text) if end else marks.tail(self._text, self._at)
            if found is not None and found.start() < held:
                self._hand_on(found.start(), say)
                self._at = found.end()
                return found[0]
            self._hand_on(held, say)
            if self.over:
                return ""
            if held == len(self._text):
                self.passing = marks.first, say
            yield
            self.passing = None

    def until_within(self, marks: Marks, limit: int) -> Read[tuple[str, str] | None]:
        """The text before the first mark and the mark, both consumed.

        None, and nothing consumed, if no mark ends within `limit` characters and its own length.
        """
        window = limit + marks.longest
        while True:
            found = marks.pattern.search(self._text, self._at, self._at + window)
            if found is not None:
                before = self._text[self._at : found.start()]
                self._at = found.end()
                return before, found[0]
            if self.over or len(self._text) - self._at >= window:
                return None
            yield

    def accept(self, marks: Marks) -> Read[str]:
        """Consume and return the mark that the text goes on with; "" if it is none."""
        while True:
            found = marks.pattern.match(self._text, self._at)
            if found is not None:
                self._at = found.end()
                return found[0]
            if self.over or not marks.begin(self._text, self._at):
                return ""
            yield

    def back(self, text: str) -> None:
        """Take back `text`, which was consumed last, without a wait since."""
        self._at -= len(text)

    def skip(self, size: int) -> None:
        """Consume characters that were seen."""
        self._at += size

    @property
    def here(self) -> str:
        """The next character, if it has arrived; else ""."""
        return self._text[self._at : self._at + 1]

    def peek(self) -> Read[str]:
        """The next character; "" at the end."""
        while self._at >= len(self._text):
            if self.over:
                return ""
            yield
        return self._text[self._at]

    def rest(self) -> str:
        """What is here and not consumed."""
        return self._text[self._at :]

    def run(self, pattern: re.Pattern[str]) -> Read[str]:
        """Consume a run of characters; `pattern` is one class of characters, one or more times."""
        parts: list[str] = []
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None:
                parts.append(found[0])
                self._at = found.end()
            if self._at < len(self._text) or self.over:
                return "".join(parts)
            yield

    def json(
        self, say: Say, say_mended: Say | None = None, ends: Marks | None = None
    ) -> Read[Status]:
        """Consume the JSON value here, up to its end ("done"), to where it goes wrong ("bad"), or
        to the end of the text ("more"). A mark of `ends` is wrong too, also inside a string, unless
        that goes on to its end after it.

        Its source goes to `say`. `say_mended` gets it with raw control characters inside strings,
        which models write, escaped.
        """
        scanner = JsonScanner()
        while True:
            mark = self._next(ends.pattern, self._at) if ends else None
            stop = len(self._text) if mark is None else mark.start()
            if ends and mark is None and not self.over:
                stop = ends.tail(self._text, self._at)
            status = self._json(scanner, say, say_mended, stop)
            if status != "more":
                return status
            if ends and mark:
                if not scanner.in_string or not (yield from self._string_goes_on(len(mark[0]))):
                    return "bad"
                self._json(scanner, say, say_mended, self._at + len(mark[0]))
            elif self.over:
                return status
            else:
                yield

    def _string_goes_on(self, size: int) -> Read[bool]:
        """Whether a string that the next `size` characters stand in goes on after them: to its
        closing quote, and JSON after that.
        """
        while True:
            at = _STRING.match(self._text, self._at + size).end()  # type: ignore[union-attr]
            if at - self._at - size >= _MAX_STRING:
                return True
            if self._text[at : at + 1] == '"':
                at = _LITTLE_SPACE.match(self._text, at + 1).end()  # type: ignore[union-attr]
                if at < len(self._text):
                    return self._text[at] in ",:]}"
            if self.over:
                return False
            yield

    def _json(self, scanner: JsonScanner, say: Say, say_mended: Say | None, limit: int) -> Status:
        status: Status = "more"
        while status == "more" and self._at < limit:
            begin = self._at
            controls = self._next(_CONTROLS, begin) if say_mended else None
            if controls is not None and controls.start() >= limit:
                controls = None
            stop = limit if controls is None else controls.start()
            status, self._at = scanner.scan(self._text, begin, stop)
            escape = False
            if status == "more" and controls is not None:
                escape = scanner.in_string
                status, self._at = scanner.scan(self._text, stop, min(controls.end(), limit))
            say(self._text[begin : self._at])
            if say_mended:
                say_mended(self._text[begin : stop if escape else self._at])
                if escape and controls is not None:
                    say_mended(json.dumps(self._text[stop : self._at])[1:-1])
        return status

    def _next(self, pattern: re.Pattern[str], position: int) -> re.Match[str] | None:
        """What the pattern finds first from `position`, looked for once, not once a value."""
        begin, found = self._found.get(pattern, (len(self._text) + 1, None))
        if begin > position or (found is not None and found.start() < position):
            found = pattern.search(self._text, position)
            self._found[pattern] = position, found
        return found

    def _hand_on(self, end: int, say: Say) -> None:
        if end > self._at:
            say(self._text[self._at : end])
            self._at = end


def run_through(reading: Read[T]) -> T:
    """What is read of a text that is over."""
    while True:
        try:
            next(reading)
        except StopIteration as stop:
            result: T = stop.value
            return result


class StreamingParser:
    """Feeds a generator, `read`, that appends to `events`."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts to look for that some tokenizers of the family hold as special tokens."""

    def __init__(self) -> None:
        self.text = Cursor()
        self.events: list[ParserEvent] = []
        self._reading = self.read()

    def read(self) -> Read[None]:
        """Read all of the text."""
        raise NotImplementedError

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """Events of the next piece of text."""
        passing = self.text.passing
        if passing is not None and passing[0].search(text) is None:
            # What most pieces are: the generator would do the same, in twice the time.
            if text:
                passing[1](text)
            return self._take_events()
        self.text.add(text)
        return self._go_on()

    def finish(self) -> list[ParserEvent]:
        """The text is over: events of what was held back."""
        self.text.end()
        return self._go_on()

    def _go_on(self) -> list[ParserEvent]:
        next(self._reading, None)
        return self._take_events()

    def _take_events(self) -> list[ParserEvent]:
        events = merged(self.events) if len(self.events) > 1 else self.events[:]
        self.events.clear()
        return events


def merged(events: list[ParserEvent]) -> list[ParserEvent]:
    """The same events, with pieces of one text in one: each is a frame of its own in a stream."""
    made: list[ParserEvent] = []
    for (kind, index), group in itertools.groupby(events, _piece_of):
        if kind is ToolCallArguments:
            made.append(ToolCallArguments(index, "".join(e.fragment for e in group)))  # type: ignore[union-attr]
        elif issubclass(kind, Content | Reasoning):
            made.append(kind("".join(e.text for e in group)))  # type: ignore[union-attr]
        else:
            made += group
    return made


def _piece_of(event: ParserEvent) -> tuple[type[ParserEvent], int]:
    return type(event), getattr(event, "index", 0)

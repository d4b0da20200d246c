"""Tool calls as JSON objects with a name and arguments: alone, in a list, or one after another."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Any, ClassVar

from .cursor import SPACES, Cursor, Marks, Read
from .tool_machine import ToolMachine, closing


class JsonCallsParser(ToolMachine):
    """A section of calls is `{call}`, `[{call}, {call}]`, or `{call}; {call}`, between marks.

    Keys come in any order; other keys are dropped. Arguments are the source text of the object.
    A section needs no closing mark.
    """

    open: ClassVar[tuple[str, ...]] = ()
    """Marks that open a section."""
    close: ClassVar[tuple[str, ...]] = ()
    """Marks that close one."""
    weak: ClassVar[tuple[str, ...]] = ()
    """Marks that open a section, but stand before other text just as well."""
    bare: ClassVar[str] = ""
    """Characters with which a section may begin the text, without a mark.

    After those, and after weak marks, a call needs arguments and the name of a tool at hand.
    """
    inline: ClassVar[tuple[str, ...]] = ()
    """Beginnings of such a section that are looked for in the whole text."""
    bare_after: ClassVar[tuple[str, ...]] = ()
    """Marks that are content, and after which a section may begin as at the start of the text."""
    opaque: ClassVar[tuple[str, str] | None] = None
    """Marks between which all is content."""
    language: ClassVar[str] = ""
    """A word that may follow an opening mark."""
    recovers: ClassVar[bool] = False
    """Whether a section goes on, at the next `{`, after what is no call."""
    name_keys: ClassVar[tuple[str, ...]] = ("name",)
    argument_keys: ClassVar[tuple[str, ...]] = ("arguments",)

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        opaque = self.opaque or ("", "")
        self._open = Marks(*self.open, *self.weak, *self.inline, *self.bare_after, opaque[0])
        self._opaque_end = Marks(opaque[1])
        self._language = Marks(self.language)
        self._close_or_open = Marks(*self.close, *self.open)
        self._close_or_call = Marks(*self.close, "{")
        super().__init__(tools=tools)

    def read(self) -> Read[None]:
        """Content and sections in turn."""
        text, say = self.text, self.answer.say
        yield from self._bare_section()
        while mark := (yield from text.until(self._open, say)):
            if self.opaque and mark == self.opaque[0]:
                say(mark)
                say((yield from text.until(self._opaque_end, say)))
            elif mark in self.bare_after:
                say(mark)
                yield from self._bare_section()
            elif mark in self.inline:
                text.back(mark)
                yield from self.section([], weak=True)
            else:
                yield from self.section([mark], weak=mark in self.weak)

    def _bare_section(self) -> Read[None]:
        gap = yield from self.text.run(SPACES)
        if not self.bare:
            self.answer.say(gap)
        elif mark := (yield from self.text.accept(self._open)):
            self.answer.say(gap)
            self.text.back(mark)
        elif (yield from self.text.peek()) in tuple(self.bare):
            yield from self.section([gap], weak=True)
        else:
            self.answer.say(gap)

    def section(self, source: list[str], *, weak: bool) -> Read[None]:
        """Calls. `source`: what was consumed, and is content if none follows."""
        text, answer = self.text, self.answer
        source.append((yield from text.accept(self._language)))
        listed = yield from sign(text, source, "[")
        calls = answer.calls
        while True:
            call = JsonCall(self, source, weak=weak)
            done = yield from call.read()
            if not done:
                answer.say("".join(source))
                if call.started or not self.recovers:
                    return
            source, gap = [], ""
            if self.recovers:
                mark = yield from text.until(self._close_or_call, answer.say)
                if mark != "{":
                    answer.say(mark if answer.calls == calls else "")
                    return
                text.back(mark)
            elif listed:
                if not (yield from sign(text, source, ",")):
                    yield from sign(text, source, "]")
                    break
            else:
                for separator in ";,":
                    if (yield from sign(text, source, separator)):
                        break
                if (yield from glance(text, source)) != "{":
                    gap = "".join(source)
                    break
        yield from closing(text, answer, self.close, self._close_or_open, gap)


class JsonCall:
    """Reads one call's object, key by key. Until it starts, `source` gets what is consumed."""

    def __init__(self, parser: JsonCallsParser, source: list[str], *, weak: bool) -> None:
        self._text, self._answer = parser.text, parser.answer
        self._name_keys, self._argument_keys = parser.name_keys, parser.argument_keys
        self._known: Callable[[str], bool] = parser.known if weak else bool
        self._weak = weak
        self._source: MutableSequence[str] = source
        self.started = False

    def read(self) -> Read[bool]:
        """Whether it is a complete call."""
        text, answer = self._text, self._answer
        name = ""
        arguments: list[str] | None = None
        keys: set[str] = set()
        if not (yield from sign(text, self._source, "{")):
            return False
        while not (yield from sign(text, self._source, "}")):
            if keys and not (yield from sign(text, self._source, ",")):
                return False
            key = yield from string(text, self._source)
            if not key or key in keys or not (yield from sign(text, self._source, ":")):
                return False
            keys.add(key)
            if key in self._name_keys and not name:
                name = yield from string(text, self._source)
                if not name or not self._known(name):
                    return False
                if arguments is not None:
                    self._start(name)
                    answer.arguments("".join(arguments))
            elif key in self._argument_keys and not self.started and arguments is None:
                if (yield from glance(text, self._source)) != "{":
                    return False
                arguments = []
                mended = arguments.append
                if name:
                    self._start(name)
                    mended = answer.arguments
                if (yield from text.json(self._source.append, mended)) != "done":
                    return False
            else:
                yield from glance(text, self._source)
                if (yield from text.json(self._source.append)) != "done":
                    return False
        if not name or (self._weak and arguments is None):
            return False
        if not self.started:
            self._start(name)
            answer.arguments("{}")
        answer.end()
        return True

    def _start(self, name: str) -> None:
        self.started = True
        self._source.clear()
        self._source = deque(maxlen=0)
        self._answer.start(name)


def glance(text: Cursor, source: MutableSequence[str]) -> Read[str]:
    """The next character after whitespace, not consumed; "" at the end."""
    source.append((yield from text.run(SPACES)))
    return (yield from text.peek())


def sign(text: Cursor, source: MutableSequence[str], char: str) -> Read[bool]:
    """Whether `char` is next after whitespace; it is consumed then."""
    if (yield from glance(text, source)) != char:
        return False
    text.skip(1)
    source.append(char)
    return True


def string(text: Cursor, source: MutableSequence[str]) -> Read[str]:
    """The value of the JSON string that is next after whitespace; "" if it is none."""
    if (yield from glance(text, source)) != '"':
        return ""
    parts: list[str] = []
    if (yield from text.json(source.append, parts.append)) != "done":
        return ""
    value = json.loads("".join(parts))
    assert isinstance(value, str)
    return value

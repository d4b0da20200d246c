"""Tool calls as JSON objects with a name and arguments: alone, in a list, or one after another."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Any, ClassVar

from ...core.old_names import module_getattr
from .cursor import SPACE, SPACES, Cursor, Marks, Read, run_through, whole_characters
from .tool_machine import ToolMachine, closing, rest_of_call


class JsonCallsParser(ToolMachine):
    """A section of calls is `{call}`, `[{call}, {call}]`, or `{call}; {call}`, between marks.

    Keys come in any order; other keys are dropped. Arguments are the source text of the object, or
    of the one that a string holds. A section needs no closing mark.
    """

    open: ClassVar[tuple[str, ...]] = ()
    """Marks that open a section."""
    close: ClassVar[tuple[str, ...]] = ()
    """Marks that close one."""
    weak: ClassVar[tuple[str, ...]] = ()
    """Marks that open a section, but may also precede other text."""
    bare: ClassVar[str] = ""
    """Characters with which a section may begin the text, without a mark.

    After these, and after weak marks, a call needs arguments and the name of a tool of the request.
    """
    inline: ClassVar[tuple[str, ...]] = ()
    """Beginnings of such a section that are also searched for inside the text."""
    bare_after: ClassVar[tuple[str, ...]] = ()
    """Marks that are content, and after which a section may begin as at the start of the text."""
    ends_turn: ClassVar[bool] = False
    """Whether nothing but calls follows a call: the rest of one that breaks off is dropped,
    although no mark closes it."""
    language: ClassVar[str] = ""
    """A word that may follow an opening mark."""
    recovers: ClassVar[bool] = False
    """Whether a section continues at the next `{` after text that is not a call."""
    name_keys: ClassVar[tuple[str, ...]] = ("name",)
    argument_keys: ClassVar[tuple[str, ...]] = ("arguments",)
    id_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the model's own id of a call; it counts where it precedes name and arguments."""
    keyed: ClassVar[bool] = False
    """Whether a call is `{name: arguments}`."""
    around: ClassVar[tuple[str, ...]] = ()
    """Other marks, which are dropped."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        opaque = self.opaque or ("", "")
        self._open = Marks(
            *self.open, *self.weak, *self.inline, *self.bare_after, *self.around, opaque[0]
        )
        self._language = Marks(self.language)
        self.close_or_open = Marks(*self.close, *self.open)
        """Texts that end a call, even if its JSON is incomplete."""
        self._close_or_call = Marks(*self.close, "{")
        super().__init__(tools=tools)

    def read(self) -> Read[None]:
        """Read content and sections in turn."""
        text, emit = self.text, self.answer.emit
        yield from self._bare_section()
        while mark := (yield from self.until_call(self._open)):
            if mark in self.bare_after:
                emit(mark)
                yield from self._bare_section()
            elif mark in self.inline:
                text.back(mark)
                yield from self.section([], weak=True)
            elif mark not in self.around:
                yield from self.section([mark], weak=mark in self.weak)

    def _bare_section(self) -> Read[None]:
        gap = yield from self.text.run(SPACES)
        if not self.bare:
            self.answer.emit(gap)
        elif mark := (yield from self.text.accept(self._open)):
            self.answer.emit(gap)
            self.text.back(mark)
        elif (yield from self.text.peek()) in tuple(self.bare):
            yield from self.section([gap], weak=True)
        else:
            self.answer.emit(gap)

    def section(self, source: list[str], *, weak: bool) -> Read[None]:
        """Read calls. source: what was consumed; content if no call follows."""
        text, answer = self.text, self.answer
        marked = any(source) and source[0] in (*self.open, *self.weak)
        source.append((yield from text.accept(self._language)))
        listed = yield from sign(text, source, "[")
        calls = answer.calls
        while True:
            call = JsonCall(self, source, weak=weak)
            done = yield from (call.read_keyed() if self.keyed else call.read())
            if not done:
                answer.emit("".join(source))
                if call.started and (self.ends_turn or (marked and self.close)):
                    yield from rest_of_call(text, self.close, self.close_or_open)
                if call.started or not self.recovers:
                    return
            source, gap = [], ""
            if self.recovers:
                mark = yield from text.until(self._close_or_call, answer.emit)
                if mark != "{":
                    answer.emit(mark if answer.calls == calls else "")
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
                if (yield from peek_after_space(text, source)) != "{":
                    gap = "".join(source)
                    break
        yield from closing(text, answer, self.close, self.close_or_open, gap)


class JsonCall:
    """Reads one call's object, key by key. `source` gets text consumed before the call starts."""

    def __init__(self, parser: JsonCallsParser, source: list[str], *, weak: bool) -> None:
        self._text, self._answer = parser.text, parser.answer
        self._name_keys, self._argument_keys = parser.name_keys, parser.argument_keys
        self._id_keys, self._id = parser.id_keys, ""
        self._ends = parser.close_or_open
        self._known: Callable[[str], bool] = parser.known if weak else bool
        self._weak = weak
        self._source: MutableSequence[str] = source
        self.started = False

    def read(self) -> Read[bool]:
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
                begin = yield from peek_after_space(text, self._source)
                if begin == '"':
                    quoted, done = yield from _quoted_object(text, self._source)
                    if not quoted:
                        return False
                    if name:
                        self._start(name)
                        answer.arguments(quoted)
                    if not done:
                        return False
                    arguments = [quoted]
                    continue
                if begin != "{":
                    return False
                arguments = []
                mended = arguments.append
                if name:
                    self._start(name)
                    mended = answer.arguments
                status = yield from text.json(self._source.append, mended, self._ends)
                if status != "done":
                    return False
            elif (
                key in self._id_keys
                and not self.started
                and (yield from peek_after_space(text, self._source)) == '"'
            ):
                self._id = yield from string(text, self._source)
                if not self._id:
                    return False
            else:
                yield from peek_after_space(text, self._source)
                if (yield from text.json(self._source.append)) != "done":
                    return False
        if not name or (self._weak and arguments is None):
            return False
        if not self.started:
            self._start(name)
            answer.arguments("{}")
        answer.end()
        return True

    def read_keyed(self) -> Read[bool]:
        """Read a call whose only key is its name; return whether it is complete. The first of
        several keys counts.
        """
        text, source = self._text, self._source
        if not (yield from sign(text, source, "{")):
            return False
        name = yield from string(text, source)
        if not name or not self._known(name) or not (yield from sign(text, source, ":")):
            return False
        if (yield from peek_after_space(text, source)) != "{":
            return False
        self._start(name)
        if (yield from text.json(_discard, self._answer.arguments, self._ends)) != "done":
            return False
        rest: MutableSequence[str] = deque(maxlen=0)
        while not (yield from sign(text, rest, "}")):
            key = (yield from sign(text, rest, ",")) and (yield from string(text, rest))
            if not key or not (yield from sign(text, rest, ":")):
                return False
            yield from peek_after_space(text, rest)
            if (yield from text.json(_discard, None, self._ends)) != "done":
                return False
        self._answer.end()
        return True

    def _start(self, name: str) -> None:
        self.started = True
        self._source.clear()
        self._source = deque(maxlen=0)
        self._answer.start(name, self._id)


def peek_after_space(text: Cursor, source: MutableSequence[str]) -> Read[str]:
    """Return the next character after whitespace without consuming it; "" at the end."""
    source.append((yield from text.run(SPACES)))
    return (yield from text.peek())


def sign(text: Cursor, source: MutableSequence[str], char: str) -> Read[bool]:
    """Consume `char` after whitespace; return whether it was there."""
    if (yield from peek_after_space(text, source)) != char:
        return False
    text.skip(1)
    source.append(char)
    return True


def string(text: Cursor, source: MutableSequence[str]) -> Read[str]:
    """Return the JSON string after whitespace; "" without one."""
    if (yield from peek_after_space(text, source)) != '"':
        return ""
    parts: list[str] = []
    if (yield from text.json(source.append, parts.append)) != "done":
        return ""
    value = json.loads("".join(parts))
    assert isinstance(value, str)
    return whole_characters(value)


_INCOMPLETE_ESCAPE = 11
"""Most characters missing from an incomplete escape: a surrogate pair's."""


def _quoted_object(text: Cursor, source: MutableSequence[str]) -> Read[tuple[str, bool]]:
    """Return the JSON object in the string at the position, as far as it goes ("" if it is not an
    object), and whether it is complete.
    """
    parts: list[str] = []
    whole = (yield from text.json(source.append, parts.append)) == "done"
    quoted = "".join(parts)
    value = ""
    for short in range(1 if whole else _INCOMPLETE_ESCAPE + 1):
        with contextlib.suppress(ValueError):
            value = json.loads(quoted if whole else quoted[: len(quoted) - short] + '"')
            break
    inner = Cursor()
    inner.add(whole_characters(value).strip(SPACE))
    inner.end()
    if inner.here != "{":
        return "", False
    object_parts: list[str] = []
    status = run_through(inner.json(_discard, object_parts.append))
    return "".join(object_parts), whole and status == "done" and not inner.rest()


def _discard(text: str) -> None:
    """Drop the text."""


__getattr__ = module_getattr(
    __name__, {"glance": "jackfield.plugins.parsing.json_calls.peek_after_space"}
)

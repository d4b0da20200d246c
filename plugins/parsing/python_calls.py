"""Tool calls written as Python: `[f(city='Paris', days=2), g()]`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .cursor import SPACES, Marks, Read
from .json_calls import peek_after_space, sign
from .python_values import STRICT, Strings, read_value
from .tool_machine import ToolMachine, closing, rest_of_call

_NAME = re.compile(r"[\w.\-]+")
_MAX_NAME = 128


class PythonCallsParser(ToolMachine):
    """A section is `[call, call]`, or with `lines` one call after another, between marks.

    Arguments are named Python literals. The text may begin with a section without marks (`bare`),
    whose calls must name a tool.
    """

    open: ClassVar[tuple[str, ...]] = ()
    close: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[bool] = True
    lines: ClassVar[bool] = False
    loose: ClassVar[bool] = False
    """Whether strings have no escapes: a quote is text unless something may follow that follows a
    string."""
    echoes: ClassVar[bool] = False
    """Whether a section's text and closing mark may be repeated, and are dropped."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._open = Marks(*self.open)
        self._close_or_open = Marks(*self.close, *self.open)
        self._strings = Strings(self._close_or_open.texts, self.loose)
        super().__init__(tools=tools)

    def read(self) -> Read[None]:
        gap = yield from self.text.run(SPACES)
        if self.bare and (yield from self.text.peek()) == "[":
            yield from self.section([gap], bare=True)
        else:
            self.answer.emit(gap)
        while mark := (yield from self.text.until(self._open, self.answer.emit)):
            calls = self.answer.calls
            yield from self.section([mark], bare=False)
            if self.echoes and self.answer.calls > calls:
                yield from self._drop_echo()

    def _drop_echo(self) -> Read[None]:
        """Drop a possible echo of the section, if a closing mark follows."""
        text, mark = self.text, self.close[0]
        while mark in self.close:
            source: list[str] = []
            if (yield from peek_after_space(text, source)) not in ("[", "<"):
                self.answer.emit("".join(source))
                return
            mark = yield from text.until(self._close_or_open, source.append)
        text.back(mark)
        self.answer.emit("".join(source))

    def section(self, source: list[str], *, bare: bool) -> Read[None]:
        """Read calls. source: consumed text, which is content if no call follows."""
        text, answer = self.text, self.answer
        listed = yield from sign(text, source, "[")
        if not listed and not self.lines:
            answer.emit("".join(source))
            return
        while True:
            calls = answer.calls
            done = yield from self._call(source, bare=bare)
            if not done and answer.calls > calls and self.close and not bare:
                yield from rest_of_call(text, self.close, self._close_or_open)
                return
            if not done:
                answer.emit("".join(source))
                return
            source.clear()
            yield from sign(text, source, ",")
            source.clear()
            following = yield from peek_after_space(text, source)
            if listed and following == "]":
                text.skip(1)
                break
            if not listed and not _NAME.match(following):
                break
            source.clear()
        yield from closing(text, answer, self.close, self._close_or_open)

    def _call(self, source: list[str], *, bare: bool) -> Read[bool]:
        """Read a call; return whether it is complete. `source` gets text consumed before it
        starts.
        """
        text, answer = self.text, self.answer
        yield from peek_after_space(text, source)
        name = yield from text.run(_NAME)
        source.append(name)
        if not name or name[0] in "0123456789-." or len(name) > _MAX_NAME:
            return False
        if (bare and not self.known(name)) or not (yield from sign(text, source, "(")):
            return False
        started = False
        while (yield from peek_after_space(text, source)) != ")" or not (yield from text.peek()):
            key = yield from text.run(_NAME)
            source.append(key)
            if not key or not (yield from sign(text, source, "=")):
                return False
            if not started:
                answer.start(name)
            answer.arguments((", " if started else "{") + json.dumps(key) + ": ")
            started = True
            source.clear()
            slip = yield from read_value(text, answer.arguments, STRICT if bare else self._strings)
            if slip is not None:
                source.append(slip)
                return False
            if not (yield from sign(text, source, ",")) and (yield from text.peek()) != ")":
                return False
            source.clear()
        text.skip(1)
        source.clear()
        if not started:
            answer.start(name)
        answer.arguments("}" if started else "{}")
        answer.end()
        return True

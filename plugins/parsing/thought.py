"""Thought between marks at the start of an answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from ...core.protocols import Content, Reasoning
from .cursor import Marks, Read, StreamingParser


class ThoughtParser(StreamingParser):
    """The text is [thought] answer. A family says how its thought is marked.

    - Newlines (`space`) right inside the marks, and right after the closing one, belong to the
      markup and are dropped. Everything else is passed on as it is.
    - After the thought all is answer; further marks in it are text, unless thought may stand
      `anywhere`.
    """

    open: ClassVar[tuple[str, ...]] = ("<think>",)
    close: ClassVar[tuple[str, ...]] = ("</think>",)
    call: ClassVar[tuple[str, ...]] = ()
    """Beginnings of a tool call that end the thought too, where the model forgets to close it."""
    begins_inside: ClassVar[bool] = True
    """Whether a text that does not begin with an opening mark is thought already, as the prompt has
    the mark. Off: it is the answer. Where the prompt ends with a mark, that counts instead."""
    always: ClassVar[bool] = False
    """Whether the model thinks, or may, whatever the request says."""
    anywhere: ClassVar[bool] = False
    """Whether thought may also stand in the answer and after it. Several are one, a line each;
    closing marks that close nothing are dropped."""
    space: ClassVar[str] = "\n"
    """Characters that are markup next to a mark."""
    answer_open: ClassVar[str] = ""
    answer_close: ClassVar[str] = ""
    """Marks around the answer, dropped with the newlines right inside; they may be missing."""

    thinking_switch: ClassVar[tuple[str, bool]] = ("enable_thinking", True)

    def __init__(self, *, thinking: bool = True) -> None:
        thinks = thinking or self.always
        self.reasoning_ended = not thinks
        """Whether thought is over, or none is to come. Once true, it stays true."""
        self._inside = thinks and self.begins_inside
        self._thought = self._another = self._answered = False
        """Whether there was thought; another begins after it; there was answer."""
        self._space = re.compile(f"[{self.space}]+")
        super().__init__()

    def see_prompt_end(self, text: str) -> None:
        """A mark that the prompt ends with says whether the thought is open."""
        text = text.rstrip()
        if text.endswith(self.open):
            self._inside, self.reasoning_ended = True, False
        elif text.endswith(self.close):
            self._inside, self.reasoning_ended = False, True

    def read(self) -> Read[None]:
        """Thought, then the answer."""
        text, space = self.text, self._space
        gap = yield from text.run(space)
        if (yield from text.accept(Marks(*self.open))) or self._inside:
            yield from text.run(space)
            mark = yield from self.until(Marks(*self.close, *self.call), self.think)
            self.reasoning_ended = True
            if mark in self.call:
                text.back(mark)
            else:
                yield from text.run(space)
            gap = ""
        self.reasoning_ended = True
        if (yield from text.accept(Marks(self.answer_open))):
            yield from text.run(space)
            gap = ""
        self.say(gap)
        if self.answer_close and (yield from self.until(Marks(self.answer_close), self.say)):
            yield from text.run(space)
        marks = Marks(*self.open, *self.close) if self.anywhere else Marks()
        while mark := (yield from text.until(marks, self.say)):
            if mark in self.open:
                yield from text.run(space)
                self._another = self._thought
                yield from self.until(Marks(*self.close), self.think)
                if not self._answered:
                    yield from text.run(space)

    def until(self, close: Marks, say: Callable[[str], None]) -> Read[str]:
        """Hand text to `say` up to a closing mark, less the space right before that."""
        held: list[str] = []

        def hold(text: str) -> None:
            bare = text.rstrip(self.space)
            if bare:
                say("".join(held) + bare)
                held.clear()
            held.append(text[len(bare) :])

        mark = yield from self.text.until(close, hold)
        if not mark:
            say("".join(held))
        return mark

    def think(self, text: str) -> None:
        """Pass thought on."""
        if text:
            self.events.append(Reasoning("\n" + text if self._another else text))
            self._another, self._thought = False, True

    def say(self, text: str) -> None:
        """Pass the answer on."""
        if text:
            self.events.append(Content(text))
            self._answered = True

"""Reasoning between marks at the start of an output."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from ...core.old_names import RenamedMethod, adopt_overrides
from ...core.protocols.parsers import Content, Reasoning
from .cursor import EmitText, Marks, Read, StreamingParser


class TaggedReasoningParser(StreamingParser):
    """Reads [reasoning] content. A family declares its marks.

    - Newlines (`space`) right inside the marks, and right after the closing one, belong to the
      markup and are dropped. Everything else is passed on as it is.
    - After the reasoning all text is content, further marks included, unless reasoning may stand
      `anywhere`.
    """

    open: tuple[str, ...] = ("<think>",)
    close: tuple[str, ...] = ("</think>",)
    first_open: ClassVar[tuple[str, ...]] = ()
    """Other marks that open reasoning, at the beginning of the text alone."""
    call: tuple[str, ...] = ()
    """Beginnings of a tool call that end the reasoning too, if the model forgets to close it."""
    begins_inside: ClassVar[bool] = True
    """Whether a text without an opening mark begins with reasoning, because the prompt has the
    mark. If not, it is content. A mark at the end of the prompt takes precedence."""
    always: ClassVar[bool] = False
    """Whether the model may reason regardless of the request."""
    anywhere: ClassVar[bool] = False
    """Whether reasoning may also stand in the content and after it. Its parts are joined by
    newlines; closing marks without an opening one are dropped."""
    space: ClassVar[str] = "\n"
    """Characters that are markup next to a mark."""
    trailing: ClassVar[str] = ""
    """Further characters that are markup in front of a closing mark."""
    answer_open: ClassVar[tuple[str, ...]] = ()
    answer_close: ClassVar[tuple[str, ...]] = ()
    """Marks around the content, dropped with the newlines right inside; they may be missing."""
    ends_turn: ClassVar[bool] = False
    """Whether text after the mark that closes the content is dropped, up to a call."""

    thinking_switch: ClassVar[tuple[str, bool]] = ("enable_thinking", True)

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        adopt_overrides(cls)

    def __init__(self, *, thinking: bool = True) -> None:
        is_reasoning = thinking or self.always
        self.reasoning_ended = not is_reasoning
        """Whether no reasoning follows. Once true, it stays true."""
        self._inside = is_reasoning and self.begins_inside
        self._reasoned = self._another = self._answered = False
        """Whether there was reasoning; whether more of it begins; whether there was content."""
        self._space = re.compile(f"[{self.space}]+")
        super().__init__()

    def see_prompt_end(self, text: str) -> None:
        """Note whether the prompt ends with a mark that opens or closes the reasoning."""
        text = text.rstrip()
        if text.endswith(self.open):
            self._inside, self.reasoning_ended = True, False
        elif text.endswith(self.close):
            self._inside, self.reasoning_ended = False, True

    def read(self) -> Read[None]:
        """Read the reasoning, then the content."""
        text, space = self.text, self._space
        gap = yield from text.run(space)
        if (yield from text.accept(Marks(*self.open, *self.first_open))) or self._inside:
            yield from text.run(space)
            mark = yield from self.until(Marks(*self.close, *self.call), self.emit_reasoning)
            self.reasoning_ended = True
            if mark in self.call:
                text.back(mark)
            else:
                yield from text.run(space)
            gap = ""
        self.reasoning_ended = True
        if (yield from text.accept(Marks(*self.answer_open))):
            yield from text.run(space)
            gap = ""
        self.emit(gap)
        if self.answer_close and (yield from self.until(Marks(*self.answer_close), self.emit)):
            yield from text.run(space)
            if self.ends_turn:
                text.back((yield from text.until(Marks(*self.call), _drop)))
        marks = Marks(*self.open, *self.close) if self.anywhere else Marks()
        while mark := (yield from text.until(marks, self.emit)):
            if mark in self.open:
                yield from text.run(space)
                self._another = self._reasoned
                mark = yield from self.until(Marks(*self.close, *self.call), self.emit_reasoning)
                if mark in self.call:
                    self.emit(mark)
                elif not self._answered:
                    yield from text.run(space)

    def until(self, close: Marks, emit: EmitText) -> Read[str]:
        """Pass text to `emit` up to a closing mark, without the space right before it."""
        space: list[str] = []

        def hold(text: str) -> None:
            bare = text.rstrip(self.space + self.trailing)
            if bare:
                emit("".join(space) + bare)
                space.clear()
            space.append(text[len(bare) :])

        mark = yield from self.text.until(close, hold)
        if not mark:
            emit("".join(space))
        return mark

    def emit_reasoning(self, text: str) -> None:
        """Pass on reasoning."""
        if text:
            self.events.append(Reasoning("\n" + text if self._another else text))
            self._another, self._reasoned = False, True

    def emit(self, text: str) -> None:
        """Pass on content."""
        if text:
            self.events.append(Content(text))
            self._answered = True

    think = RenamedMethod("emit_reasoning")
    say = RenamedMethod("emit")


def _drop(text: str) -> None:
    """Drop the text."""

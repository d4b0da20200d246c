"""Thought between `<think>` and `</think>`, as Qwen3 and its relatives write it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from ...core.protocols import Content, ParserEvent, Reasoning

_OPEN, _CLOSE = "<think>", "</think>"


class Qwen3Reasoning:
    """Splits thought from answer.

    - thinking: the text begins inside the thought, whether the model writes `<think>` itself or
      the template has opened it already. All is thought until `</think>`.
    - not thinking (the template closed the thought): the text is the answer, unless the model
      begins with `<think>` nevertheless.
    - Newlines right after `<think>`, right before `</think>` and right after `</think>` belong to
      the markup and are dropped. Everything else is passed on as it is.
    - After `</think>` all is answer; further tags in it are text.
    """

    markers: ClassVar[tuple[str, str]] = (_OPEN, _CLOSE)

    def __init__(self, *, thinking: bool = True) -> None:
        self._thinking = thinking
        self._state: Literal["start", "opened", "thought", "closed", "answer"] = "start"
        self._newlines = 0
        """Newlines not passed on yet: they may belong to a tag after them."""
        self._tag = ""
        """What may become a tag, after those newlines."""

    @property
    def reasoning_ended(self) -> bool:
        """Whether what follows is answer."""
        return self._state in ("closed", "answer")

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """Events of the next piece of text."""
        events: list[ParserEvent] = []
        text = self._tag + text
        self._tag = ""
        if self._state == "start":
            text = self._start(text)
        if self._state == "opened":
            text = text.lstrip("\n")
            if text:
                self._state = "thought"
        if self._state == "thought":
            text = self._thought(text, events)
        if self._state == "closed":
            text = text.lstrip("\n")
            if text:
                self._state = "answer"
        if self._state == "answer" and text:
            events.append(Content(self._take_newlines() + text))
        return events

    def finish(self) -> list[ParserEvent]:
        """The text is over: what was held back is what it looks like."""
        begun = self._state == "start"
        if begun and self._thinking:
            self._newlines = 0
        rest = self._take_newlines() + self._tag
        self._tag = ""
        if not rest:
            return []
        return [Content(rest) if begun and not self._thinking else Reasoning(rest)]

    def _take_newlines(self) -> str:
        newlines, self._newlines = "\n" * self._newlines, 0
        return newlines

    def _start(self, text: str) -> str:
        """Look for the opening tag; returns what follows it, or "" while that is open."""
        begun = text.lstrip("\n")
        self._newlines += len(text) - len(begun)
        if _OPEN.startswith(begun) and begun != _OPEN:
            self._tag = begun
            return ""
        if begun.startswith(_OPEN):
            self._state, self._newlines = "opened", 0
            return begun[len(_OPEN) :]
        if self._thinking:
            self._state, self._newlines = "thought", 0
        else:
            self._state = "answer"
        return begun

    def _thought(self, text: str, events: list[ParserEvent]) -> str:
        """Pass thought on up to the closing tag; returns what follows the tag."""
        end = text.find(_CLOSE)
        closed = end >= 0
        if not closed:
            end = _cut_tag(text)
            self._tag = text[end:]
        thought = text[:end].rstrip("\n")
        if thought:
            events.append(Reasoning(self._take_newlines() + thought))
        self._newlines += end - len(thought)
        if not closed:
            return ""
        self._state, self._newlines = "closed", 0
        return text[end + len(_CLOSE) :]


class ThinkTagsReasoning(Qwen3Reasoning):
    """For models that think when they like: text is thought only where `<think>` begins it."""

    def __init__(self, *, thinking: bool = True) -> None:
        super().__init__(thinking=False)


def _cut_tag(text: str) -> int:
    """Where a tail begins that may be a closing tag cut short; len(text) if there is none."""
    start = text.rfind("<", max(0, len(text) - len(_CLOSE) + 1))
    return start if start >= 0 and _CLOSE.startswith(text[start:]) else len(text)

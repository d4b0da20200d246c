"""Thought between `<think>` and `</think>`, as Qwen3 and its relatives write it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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

    def __init__(self, *, thinking: bool = True) -> None:
        self._thinking = thinking
        self._state: Literal["start", "opened", "thought", "closed", "answer"] = "start"
        self._held = ""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """Events of the next piece of text."""
        events: list[ParserEvent] = []
        text = self._held + text
        self._held = ""
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
            events.append(Content(text))
        return events

    def finish(self) -> list[ParserEvent]:
        """The text is over: what was held back is what it looks like."""
        rest, self._held = self._held, ""
        if not rest:
            return []
        if self._thinking or self._state == "thought":
            return [Reasoning(rest)]
        return [Content(rest)]

    def _start(self, text: str) -> str:
        """Look for the opening tag; returns what follows it, or "" while that is open."""
        begun = text.lstrip("\n")
        if begun.startswith(_OPEN):
            self._state = "opened"
            return begun[len(_OPEN) :]
        if _OPEN.startswith(begun):
            self._held = text
            return ""
        self._state = "thought" if self._thinking else "answer"
        return begun if self._thinking else text

    def _thought(self, text: str, events: list[ParserEvent]) -> str:
        """Pass thought on up to the closing tag; returns what follows the tag."""
        end = text.find(_CLOSE)
        if end >= 0:
            thought = text[:end].rstrip("\n")
            self._state = "closed"
            rest = text[end + len(_CLOSE) :]
        else:
            thought = text[: _safe_end(text)]
            self._held = text[len(thought) :]
            rest = ""
        if thought:
            events.append(Reasoning(thought))
        return rest


def _safe_end(text: str) -> int:
    """Where a tail begins that may be newlines and a closing tag cut short."""
    start = text.rfind("<", max(0, len(text) - len(_CLOSE) + 1))
    end = start if start >= 0 and _CLOSE.startswith(text[start:]) else len(text)
    while end and text[end - 1] == "\n":
        end -= 1
    return end

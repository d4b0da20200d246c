"""Reasoning of Cohere's models, with citations."""

from __future__ import annotations

import re
from typing import ClassVar

from ..parsing.cursor import EmitText, Marks, Read
from ..parsing.tagged_reasoning import TaggedReasoningParser

_CITATION = re.compile(r"<co>|</co:[^<>]{0,256}>")
_BEGINNING = re.compile(r"<(c|co|/|/c|/co|/co:[^<>]{0,256})?\Z")


class CohereCommand3Reasoning(TaggedReasoningParser):
    """`<|START_THINKING|>…<|END_THINKING|>`, then `<|START_RESPONSE|>…<|END_RESPONSE|>`. Marks of
    citations, `<co>…</co: 0:[1]>`, are taken out. Calls end the reasoning, too.
    """

    open, close = ("<|START_THINKING|>",), ("<|END_THINKING|>",)
    call = ("<|START_ACTION|>",)
    answer_open: ClassVar[tuple[str, ...]] = ("<|START_RESPONSE|>",)
    answer_close: ClassVar[tuple[str, ...]] = ("<|END_RESPONSE|>",)
    markers: ClassVar[tuple[str, ...]] = (*open, *close, *call, *answer_open, *answer_close)
    begins_inside = False
    trailing = " \t\r"
    thinking_switch = ("reasoning", True)

    def until(self, close: Marks, emit: EmitText) -> Read[str]:
        """Pass text to `emit` up to a closing mark, removing citations outside of calls."""
        citations = CitationFilter(emit)
        mark = yield from super().until(Marks(*close.texts, *self.call), citations.add)
        citations.finish()
        if mark in self.call and mark not in close.texts:
            emit(mark)
            mark = yield from super().until(close, emit)
        return mark


class CohereCommand4Reasoning(CohereCommand3Reasoning):
    """`…<|END_THINKING|>`, then `<|START_TEXT|>…<|END_TEXT|>`: the template opens the reasoning.
    Marks of citations, `<co>…</co: 0:[1]>`, are taken out. Calls end the reasoning, too.
    """

    answer_open = ("<|START_TEXT|>", "<|START_RESPONSE|>")
    answer_close = ("<|END_TEXT|>", "<|END_RESPONSE|>")
    markers = (*CohereCommand3Reasoning.markers, answer_open[0], answer_close[0])
    begins_inside = True
    ends_turn = True


class CitationFilter:
    """Removes citation marks."""

    def __init__(self, emit: EmitText) -> None:
        self._emit = emit
        self._pending = ""

    def add(self, text: str) -> None:
        text = self._pending + text
        at = 0
        for match in _CITATION.finditer(text):
            self._pass_on(text[at : match.start()])
            at = match.end()
        beginning = _BEGINNING.search(text, at)
        end = beginning.start() if beginning else len(text)
        self._pass_on(text[at:end])
        self._pending = text[end:]

    def finish(self) -> None:
        self._pass_on(self._pending)
        self._pending = ""

    def _pass_on(self, text: str) -> None:
        if text:
            self._emit(text)

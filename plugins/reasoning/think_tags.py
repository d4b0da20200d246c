"""Thought between `<think>` and `</think>`, as Qwen3 and many others write it.

Rules, the same for any cutting of the text:
- An output that begins with `<think>` has a thought, up to `</think>` or the end.
- Any other output is all answer; tags in the middle of it are text.
- White space between thought and answer belongs to neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.protocols import Content, ParserEvent, Reasoning
from ...core.text.markers import partial_suffix

OPEN, CLOSE = "<think>", "</think>"


class Qwen3Reasoning:
    """The model itself writes `<think>`; an output that does not begin with it has no thought."""

    def __init__(self, *, thinking: bool = True) -> None:
        self._pending = ""
        self._state = "start"
        """start: nothing but space so far; thought; gap: space after the thought; answer."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """→ Reasoning and Content."""
        self._pending += text
        return self._advance(final=False)

    def finish(self) -> list[ParserEvent]:
        """→ what was held back."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> list[ParserEvent]:
        events: list[ParserEvent] = []
        while self._step(events, final):
            pass
        return events

    def _step(self, events: list[ParserEvent], final: bool) -> bool:
        """One change of state; False when more text is needed."""
        if self._state == "start":
            return self._begin(final)
        if self._state == "thought":
            return self._think(events, final)
        if self._state == "gap":
            self._pending = self._pending.lstrip()
            if self._pending:
                self._state = "answer"
            return bool(self._pending)
        if self._pending:
            events.append(Content(self._pending))
            self._pending = ""
        return False

    def _begin(self, final: bool) -> bool:
        begin = self._pending.lstrip()
        if begin.startswith(OPEN):
            self._pending = begin[len(OPEN) :]
            self._state = "thought"
            return True
        if not final and OPEN.startswith(begin):
            return False
        self._state = "answer"
        return True

    def _think(self, events: list[ParserEvent], final: bool) -> bool:
        end = self._pending.find(CLOSE)
        if end >= 0:
            thought, self._pending = self._pending[:end], self._pending[end + len(CLOSE) :]
            self._state = "gap"
        else:
            held = 0 if final else partial_suffix(self._pending, (CLOSE,))
            cut = len(self._pending) - held
            thought, self._pending = self._pending[:cut], self._pending[cut:]
        if thought:
            events.append(Reasoning(thought))
        return end >= 0

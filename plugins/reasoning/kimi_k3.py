"""Reasoning of Kimi K3: its channel `think`."""

from __future__ import annotations

from typing import ClassVar

from ...core.protocols.parsers import CallText, Content, Reasoning
from ..parsing import xtml
from ..parsing.cursor import Marks, Read, StreamingParser

_MARKS = Marks(xtml.THINK, xtml.THINK_END, xtml.RESPONSE, xtml.RESPONSE_END, xtml.TOOLS,
               xtml.MESSAGE_END, "<|end_of_msg|>")  # fmt: skip


class KimiK3Reasoning(StreamingParser):
    """`…<|close|>think<|sep|>`, then `<|open|>response<|sep|>…<|close|>response<|sep|>`: the
    template opens the one or the other. Calls are for the tool parser `kimi_k3`.
    """

    markers = xtml.MARKERS
    thinking_switch: ClassVar[tuple[str, bool]] = ("thinking", True)

    def __init__(self, *, thinking: bool = True) -> None:
        self.reasoning_ended = not thinking
        """Whether no reasoning follows; stays true."""
        self._inside = thinking
        super().__init__()

    def see_prompt_end(self, text: str) -> None:
        if text.endswith((xtml.THINK, xtml.RESPONSE)):
            self._inside = text.endswith(xtml.THINK)
            self.reasoning_ended = not self._inside

    def read(self) -> Read[None]:
        text = self.text
        while mark := (yield from text.until(_MARKS, self._emit)):
            self._inside = mark == xtml.THINK
            self.reasoning_ended = self.reasoning_ended or not self._inside
            if mark == xtml.TOOLS:
                self._pass_on(mark)
                self._pass_on((yield from text.until(Marks(xtml.TOOLS_END), self._pass_on)))

    def _emit(self, text: str) -> None:
        if text:
            self.events.append(Reasoning(text) if self._inside else Content(text))

    def _pass_on(self, text: str) -> None:
        if text:
            self.events.append(CallText(text))

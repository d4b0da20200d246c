"""Reasoning of gpt-oss: its messages in the channel `analysis`."""

from __future__ import annotations

from ...core.protocols.parsers import CallText, Content, PlainText, Reasoning
from ..parsing.cursor import Read, StreamingParser
from ..parsing.harmony import BEGIN, END, MARKERS, Messages, first_recipient, header


class HarmonyReasoning(StreamingParser):
    """`<|channel|>analysis<|message|>…<|end|>`; messages in other channels are content, one line
    each.

    Messages to a tool are passed on with their headers, for the tool parser `openai`; without it
    they are not shown. Reasoning has ended when the channel `final` begins. Text outside of
    messages is content.
    """

    markers = MARKERS

    def __init__(self, *, thinking: bool = True) -> None:
        self._in_message = False
        """Whether content is a message to the user, in which quoted calls are text."""
        self.reasoning_ended = False
        """Whether the content has begun; stays true."""
        super().__init__()

    def read(self) -> Read[None]:
        text, answer, reasoning = self.text, Messages(self._emit), Messages(self._think)
        lead = yield from first_recipient(text)
        while mark := (yield from text.until(BEGIN, answer.emit)):
            mark, lead = lead + mark, ""
            message = yield from header(text, mark)
            if message is None:
                answer.emit(mark)
                continue
            if message.recipient:
                self._pass_on(message.source)
                end = yield from text.until(END, self._pass_on)
                if end != "<|start|>":
                    self._pass_on(end)
            else:
                messages = reasoning if message.channel == "analysis" else answer
                messages.begin()
                self.reasoning_ended = self.reasoning_ended or message.channel == "final"
                self._in_message = True
                end = yield from text.until(END, messages.emit)
                self._in_message = False
            if end == "<|start|>":
                text.back(end)

    def _think(self, text: str) -> None:
        self.events.append(Reasoning(text))

    def _emit(self, text: str) -> None:
        self.events.append(PlainText(text) if self._in_message else Content(text))

    def _pass_on(self, text: str) -> None:
        if text:
            self.events.append(CallText(text))

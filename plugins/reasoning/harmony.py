"""Thought of gpt-oss: what it writes in the channel `analysis`."""

from __future__ import annotations

from ...core.protocols import Content, Reasoning
from ..parsing.cursor import Read, StreamingParser
from ..parsing.harmony import BEGIN, END, MARKERS, header


class HarmonyReasoning(StreamingParser):
    """`<|channel|>analysis<|message|>…<|end|>`; messages in other channels are the answer.

    Messages to a tool are passed on with their headers, for the tool parser `openai`. Thought has
    ended when the channel `final` begins. Text outside of messages is the answer.
    """

    markers = MARKERS

    def __init__(self, *, thinking: bool = True) -> None:
        self.reasoning_ended = False
        """Whether the answer has begun. Once true, it stays true."""
        self._thought = False
        self._separator = ""
        super().__init__()

    def read(self) -> Read[None]:
        """Messages in turn."""
        text = self.text
        while mark := (yield from text.until(BEGIN, self._say)):
            message = yield from header(text, mark)
            if message is None:
                self._say(mark)
            elif message.recipient:
                self._say(message.source)
                end = yield from text.until(END, self._say)
                if end == "<|start|>":
                    text.back(end)
                else:
                    self._say(end)
            else:
                if message.channel != "analysis":
                    self.reasoning_ended = self.reasoning_ended or message.channel == "final"
                    end = yield from text.until(END, self._say)
                else:
                    end = yield from text.until(END, self._think)
                    self._separator = "\n" if self._thought else ""
                if end == "<|start|>":
                    text.back(end)

    def _think(self, text: str) -> None:
        self.events.append(Reasoning(self._separator + text))
        self._separator, self._thought = "", True

    def _say(self, text: str) -> None:
        if text:
            self.events.append(Content(text))

"""Tool calls of gpt-oss: messages to `functions.NAME`."""

from __future__ import annotations

from ..parsing.cursor import SPACES, Read
from ..parsing.harmony import BEGIN, END, ENDS, MARKERS, Header, Messages, header
from ..parsing.tool_machine import ToolMachine


class HarmonyToolParser(ToolMachine):
    """`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>`.

    Messages without a recipient are content, one line each. Those to a recipient that is not a tool
    of the request are not shown.

    Use it with the reasoning parser `gptoss`, which removes the reasoning.
    """

    markers = MARKERS

    def read(self) -> Read[None]:
        """Read messages in turn."""
        text, messages = self.text, Messages(self.answer.say)
        while mark := (yield from text.until(BEGIN, messages.say)):
            message = yield from header(text, mark)
            if message is None:
                messages.say(mark)
                continue
            if message.recipient:
                yield from self._call(message)
                end = yield from text.until(END, _drop)
            else:
                messages.begin()
                end = yield from text.until(END, messages.say)
            if end == "<|start|>":
                text.back(end)

    def _call(self, message: Header) -> Read[None]:
        """Read a call, without what follows it."""
        text, answer = self.text, self.answer
        name = message.recipient.removeprefix("functions.")
        if not name or not (name != message.recipient or name in self.schemas):
            return
        yield from text.run(SPACES)
        answer.start(name)
        if end := (yield from text.accept(END)):
            text.back(end)
            answer.arguments("{}")
            answer.end()
        elif (yield from text.peek()) == "{":
            status = yield from text.json(_drop, answer.arguments, ENDS)
            if status == "done":
                answer.end()


def _drop(text: str) -> None:
    """Drop the text."""

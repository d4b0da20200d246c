"""Tool calls of gpt-oss: messages to `functions.NAME`."""

from __future__ import annotations

from ..parsing.cursor import SPACES, Read
from ..parsing.harmony import BEGIN, END, MARKERS, Header, header
from ..parsing.tool_machine import MAX_JUNK, ToolMachine


class HarmonyToolParser(ToolMachine):
    """`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>`.

    Messages without a recipient are content.

    Use it with the reasoning parser `gptoss`, which takes the thought out.
    """

    markers = MARKERS

    def read(self) -> Read[None]:
        """Messages in turn."""
        text, say = self.text, self.answer.say
        while mark := (yield from text.until(BEGIN, say)):
            message = yield from header(text, mark)
            if message is None:
                say(mark)
                continue
            if message.recipient:
                yield from self._call(message)
            else:
                end = yield from text.until(END, say)
                if end == "<|start|>":
                    text.back(end)

    def _call(self, message: Header) -> Read[None]:
        text, answer = self.text, self.answer
        gap = yield from text.run(SPACES)
        name = message.recipient.removeprefix("functions.")
        end = (yield from text.accept(END)) if name else ""
        if end:
            answer.start(name)
            answer.arguments("{}")
            answer.end()
        elif name and (yield from text.peek()) == "{":
            answer.start(name)
            if (yield from text.json(lambda _: None, answer.arguments)) != "done":
                return
            answer.end()
            found = yield from text.until_within(END, MAX_JUNK)
            end = found[1] if found is not None else ""
        else:
            answer.say(message.source + gap)
        if end == "<|start|>":
            text.back(end)

"""Tool calls of gpt-oss: messages to `functions.NAME`."""

from __future__ import annotations

import re

from ..parsing.block_calls import objects, value_of
from ..parsing.cursor import SPACES, Read
from ..parsing.harmony import BEGIN, END, ENDS, MARKERS, Header, Messages, first_recipient, header
from ..parsing.schema_values import parameter_types
from ..parsing.tool_machine import ToolMachine


class HarmonyToolParser(ToolMachine):
    """`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>`.

    Messages without a recipient are content, one line each. Those to a recipient that is not a tool
    of the request are not shown.

    Use it with the reasoning parser `gptoss`, which removes the reasoning.
    """

    markers = MARKERS

    def read(self) -> Read[None]:
        text, messages = self.text, Messages(self.answer.emit)
        lead = yield from first_recipient(text)
        while mark := (yield from text.until(BEGIN, messages.emit)):
            mark, lead = lead + mark, ""
            message = yield from header(text, mark)
            if message is None:
                messages.emit(mark)
                continue
            if message.recipient:
                yield from self.call(message)
                end = yield from text.until(END, _drop)
            else:
                messages.begin()
                end = yield from text.until(END, messages.emit)
            if end == "<|start|>":
                text.back(end)

    def call(self, message: Header) -> Read[None]:
        """Read a call up to its end."""
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


_PARAMETER = re.compile(r'\s*<rfl:parameter name="([^"<>]*)">\n?(.*?)\n?</rfl:parameter>', re.S)
_STRING = frozenset({"string"})


class BeamToolParser(HarmonyToolParser):
    """` to=f<|channel|>analysis <|constrain|>xml<|message|>`, then for each argument
    `<rfl:parameter name="a">`, its value on lines, `</rfl:parameter>`, and `<|call|>`.

    Use it with the reasoning parser `beam`, which removes the reasoning.
    """

    def call(self, message: Header) -> Read[None]:
        """Read a whole call. A wrong or unfinished one ends before its first wrong argument,
        without an end event.
        """
        text, answer = self.text, self.answer
        body: list[str] = []
        name = message.recipient
        if not self.known(name):
            return
        end = yield from text.until(END, body.append)
        text.back(end)
        source, position = "".join(body), 0
        arguments: dict[str, str] = {}
        while match := _PARAMETER.match(source, position):
            types = parameter_types(self.schemas.get(name), match[1]) or _STRING
            arguments[match[1]] = value_of(match[2], types)
            position = match.end()
        answer.start(name)
        complete = not source[position:].strip()
        answer.arguments(objects(arguments)[: None if complete else -1])
        if complete:
            answer.end()


def _drop(text: str) -> None:
    """Drop the text."""

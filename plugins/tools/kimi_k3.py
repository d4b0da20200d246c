"""Tool calls of Kimi K3: elements whose arguments name their type."""

from __future__ import annotations

import re

from ..parsing import xtml
from ..parsing.tagged_calls import TaggedCallsParser

_NAME = re.compile(r'\s*"([^"]*)".*', re.S)
_KEY = re.compile(r'\s*"([^"]*)"(?:\s+type="(\w+)")?\s*')
_STRING = frozenset({"string"})


class KimiK3ToolParser(TaggedCallsParser):
    """In `<|open|>tools<|sep|>`: `<|open|>call tool="f" index="1"<|sep|>`, in it
    `<|open|>argument key="a" type="string"<|sep|>…<|close|>argument<|sep|>` or one element `json`,
    and `<|close|>call<|sep|>`. The type is the argument's own, whatever the schema says.
    """

    around = (
        xtml.TOOLS, xtml.TOOLS_END, xtml.RESPONSE, xtml.RESPONSE_END, xtml.MESSAGE_END,
        "<|end_of_msg|>",
    )  # fmt: skip
    open, close = "<|open|>call tool=", "<|close|>call<|sep|>"
    name_end = ("<|sep|>",)
    parameter, key_end = "<|open|>argument key=", "<|sep|>"
    value_end = ("<|close|>argument<|sep|>",)
    all_open = '<|open|>json type="object"<|sep|>'
    newlines = False
    markers = xtml.MARKERS

    def name_of(self, header: str) -> str:
        match = _NAME.fullmatch(header)
        return _unescaped(match[1]) if match else ""

    def argument(self, name: str, header: str) -> tuple[str, frozenset[str]]:
        """Return an argument's key, and its type attribute."""
        match = _KEY.fullmatch(header)
        if match is None:
            return super().argument(name, header)
        return _unescaped(match[1]), _STRING if match[2] == "string" else frozenset()


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")

"""Model families that write tool calls as Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...core.protocols.parsers import ArgumentForm, CallForm
from ..parsing.cursor import Read
from ..parsing.json_calls import JsonCallsParser
from ..parsing.python_calls import PythonCallsParser

_PYTHON = {"true": "True", "false": "False", "null": "None"}
_LIST = CallForm(
    trigger="[",
    open="[",
    begin="{name}(",
    end=")",
    between=", ",
    close="]",
    quoted=False,
    arguments=ArgumentForm(begin="{key}=", between=", ", named=_PYTHON),
    never_first=r"[ \t\r\n]*\[",
    only_first=True,
)


class PythonicToolParser(PythonCallsParser):
    """`[f(a=1), g()]` at the start of the text."""

    call_form = _LIST


class Llama4PythonicToolParser(PythonCallsParser):
    """`[f(a=1), g()]`, alone or in `<|python_start|>…<|python_end|>`."""

    open, close = ("<|python_start|>",), ("<|python_end|>",)
    markers = (*open, *close)
    call_form = msgspec.structs.replace(_LIST, never=open)


class Olmo3ToolParser(PythonCallsParser):
    """`<function_calls>f(a=1)`, one call per line, and `</function_calls>`."""

    open, close = ("<function_calls>",), ("</function_calls>",)
    lines = True
    call_form = CallForm(
        trigger="<function_calls>",
        open="<function_calls>",
        begin="{name}(",
        end=")",
        between="\n",
        close="</function_calls>",
        quoted=False,
        arguments=_LIST.arguments,
        never_first=_LIST.never_first,
    )


class _JsonInMarks(JsonCallsParser):
    open, close = ("<|tool_call_start|>",), ("<|tool_call_end|>",)


_MAX_AHEAD = 64
"""Characters searched for the beginning of a list's first call."""
_FIRST = re.compile(r"\s*\[?\s*([^\s\[])")


class Lfm2ToolParser(PythonCallsParser):
    """`<|tool_call_start|>[f(a="x"), g()]<|tool_call_end|>`, also with JSON objects in the list.
    Quotes in strings need no escapes."""

    open, close = ("<|tool_call_start|>",), ("<|tool_call_end|>",)
    bare = False
    loose = echoes = True

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools=tools)
        self._json = _JsonInMarks(tools=tools)
        self._json.text, self._json.answer = self.text, self.answer

    def section(self, source: list[str], *, bare: bool) -> Read[None]:
        """Read calls. source: consumed text, which is content if no call follows."""
        if (yield from self._is_json()):
            yield from self._json.section(source, weak=False)
        else:
            yield from super().section(source, bare=bare)

    def _is_json(self) -> Read[bool]:
        while True:
            ahead = self.text.ahead(_MAX_AHEAD)
            if match := _FIRST.match(ahead):
                return match[1] == "{"
            if self.text.over or len(ahead) == _MAX_AHEAD:
                return False
            yield

    markers = (*open, *close)

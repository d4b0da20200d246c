"""Model families that write tool calls as Python."""

from __future__ import annotations

import msgspec

from ...core.protocols.parsers import ArgumentForm, CallForm
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


class Lfm2ToolParser(PythonCallsParser):
    """`<|tool_call_start|>[f(a="x"), g()]<|tool_call_end|>`."""

    open, close = ("<|tool_call_start|>",), ("<|tool_call_end|>",)
    bare = False
    markers = (*open, *close)

"""Model families that write tool calls as Python."""

from __future__ import annotations

from ..parsing.python_calls import PythonCallsParser


class PythonicToolParser(PythonCallsParser):
    """`[f(a=1), g()]` at the start of the text."""


class Llama4PythonicToolParser(PythonCallsParser):
    """`[f(a=1), g()]`, alone or in `<|python_start|>…<|python_end|>`."""

    open, close = ("<|python_start|>",), ("<|python_end|>",)
    markers = (*open, *close)


class Olmo3ToolParser(PythonCallsParser):
    """`<function_calls>f(a=1)`, a call a line, and `</function_calls>`."""

    open, close = ("<function_calls>",), ("</function_calls>",)
    lines = True

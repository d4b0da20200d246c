"""Model families that write calls in DeepSeek's markup: arguments say whether they are strings."""

from __future__ import annotations

import re
from typing import ClassVar

from ..parsing.schema_values import parameter_types
from ..parsing.tagged_calls import TaggedCallsParser

_HEADER = re.compile(r"""\s*"([^"]*)"\s+string="(true|false)"\s*""")
_STRING = frozenset({"string"})


class _DsmlToolParser(TaggedCallsParser):
    """Each argument has two attributes, its name and whether it is a string; other values are JSON.
    The request's schema takes precedence over the second. Text after the calls is dropped.
    """

    newlines = False
    untyped: ClassVar[frozenset[str]] = frozenset()
    wrappers = ("arguments", "input")

    def argument(self, name: str, header: str) -> tuple[str, frozenset[str]]:
        match = _HEADER.fullmatch(header)
        if match is None:
            return super().argument(name, header)
        declared = parameter_types(self.schemas.get(name), match[1])
        return match[1], declared or (_STRING if match[2] == "true" else self.untyped)


def _value_ends(
    parameter: str, close: str, value_end: str, last: tuple[str, ...]
) -> tuple[str, ...]:
    """Return what ends a value: its closing tag, or a tag that may follow it."""
    others = (parameter, close, *last)
    return (value_end, *(newline + other for other in others for newline in ("\n", "")))


class DeepSeekV32ToolParser(_DsmlToolParser):
    """`<｜DSML｜function_calls>`, then `<｜DSML｜invoke name="f">`, in it
    `<｜DSML｜parameter name="a" string="true">…</｜DSML｜parameter>`, and closing tags, on lines.
    """

    around: ClassVar[tuple[str, ...]] = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    last: ClassVar[tuple[str, ...]] = (around[1],)
    open, close = "<｜DSML｜invoke name=", "</｜DSML｜invoke>"
    parameter = "<｜DSML｜parameter name="
    value_end: ClassVar[tuple[str, ...]] = _value_ends(
        parameter, close, "</｜DSML｜parameter>", last
    )
    markers: ClassVar[tuple[str, ...]] = (*around, "｜DSML｜")


class DeepSeekV4ToolParser(DeepSeekV32ToolParser):
    """`<｜DSML｜tool_calls>`, then `<｜DSML｜invoke name="f">`, in it
    `<｜DSML｜parameter name="a" string="true">…</｜DSML｜parameter>`, and closing tags, on lines.
    """

    around = (
        "<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>",
        "</｜DSML｜tool_calls>", "</｜DSML｜toolcalls>", "</｜DSML｜tool>",
    )  # fmt: skip
    last = around[3:]
    value_end = _value_ends(
        DeepSeekV32ToolParser.parameter, DeepSeekV32ToolParser.close, "</｜DSML｜parameter>", last
    )
    markers = (*around, "｜DSML｜")


class DeepSeekV41ToolParser(_DsmlToolParser):
    """As `deepseek_v4`, with a space before each name: `<｜DSML｜ calls>`,
    `<｜DSML｜ invoke name="f">`, `<｜DSML｜ parameter name="a" string="true">`.
    """

    around = ("<｜DSML｜ calls>", "</｜DSML｜ calls>")
    last = (around[1],)
    open, close = "<｜DSML｜ invoke name=", "</｜DSML｜ invoke>"
    parameter = "<｜DSML｜ parameter name="
    value_end = _value_ends(parameter, close, "</｜DSML｜ parameter>", last)
    markers = (*around, "｜DSML｜")


class GigaChat35ToolParser(_DsmlToolParser):
    """`<｜GCML｜tool_calls>`, then `<｜GCML｜invoke name="f">`, in it `<｜GCML｜parameter name="a"
    string="true">…</｜GCML｜parameter>`, and the closing tags, on lines.
    """

    around = ("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>", "<|message_sep|>")
    last = (around[1],)
    open, close = "<｜GCML｜invoke name=", "</｜GCML｜invoke>"
    parameter = "<｜GCML｜parameter name="
    value_end = _value_ends(parameter, close, "</｜GCML｜parameter>", last)
    markers = (*around, "｜GCML｜")

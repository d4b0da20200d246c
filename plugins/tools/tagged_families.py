"""Model families that write a call's arguments in tags of their own."""

from __future__ import annotations

from ..parsing.tagged_calls import TaggedCallsParser


class Qwen3CoderToolParser(TaggedCallsParser):
    """`<tool_call><function=f><parameter=a>…</parameter></function></tool_call>`, on lines."""

    around = ("<tool_call>", "</tool_call>")
    open, close = "<function=", "</function>"
    parameter, value_end = "<parameter=", ("</parameter>", "\n<parameter=", "\n</function>")
    markers = around


class SeedOssToolParser(Qwen3CoderToolParser):
    """`<seed:tool_call><function=f><parameter=a>…</parameter></function></seed:tool_call>`."""

    around = ("<seed:tool_call>", "</seed:tool_call>")
    markers = around


class MiniMaxM2ToolParser(TaggedCallsParser):
    """`<minimax:tool_call><invoke name="f"><parameter name="a">…</parameter></invoke>…`."""

    around = ("<minimax:tool_call>", "</minimax:tool_call>")
    open, close = "<invoke name=", "</invoke>"
    parameter, value_end = "<parameter name=", ("</parameter>",)
    newlines = False
    markers = around


class Step3ToolParser(TaggedCallsParser):
    """`<steptml:invoke name="f"><steptml:parameter name="a">…</steptml:parameter>…`, in marks."""

    around = (
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        "<｜tool_call_end｜>",
        "<｜tool_sep｜>",
    )
    lead = "<｜tool_call_begin｜>"
    open, close = "<steptml:invoke name=", "</steptml:invoke>"
    parameter, value_end = "<steptml:parameter name=", ("</steptml:parameter>",)
    newlines = False
    markers = (*around, lead)


class Glm45ToolParser(TaggedCallsParser):
    """`<tool_call>f`, then `<arg_key>a</arg_key><arg_value>…</arg_value>` on lines, and
    `</tool_call>`. Strings are plain, other values JSON.
    """

    open, close = "<tool_call>", "</tool_call>"
    name_end = ("\n", "<arg_key>", "</tool_call>")
    parameter, key_end = "<arg_key>", "</arg_key>"
    value_open, value_end = "<arg_value>", ("</arg_value>",)
    newlines = False
    untyped = frozenset()
    markers = (open, close, parameter, key_end, value_open, *value_end)

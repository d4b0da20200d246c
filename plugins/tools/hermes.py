"""Tool calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

from __future__ import annotations

import msgspec

from ...core.protocols.parsers import CallForm
from ..parsing.json_calls import JsonCallsParser


class HermesToolParser(JsonCallsParser):
    """`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`."""

    open = ("<tool_call>",)
    close = ("</tool_call>",)
    call_form = CallForm(
        trigger="<tool_call>",
        open='<tool_call>\n{"name": "',
        begin='{name}", "arguments": ',
        end="}",
        between='\n</tool_call>\n<tool_call>\n{"name": "',
        close="\n</tool_call>",
    )


class LongCatToolParser(HermesToolParser):
    """`<longcat_tool_call>{"name": "f", "arguments": {…}}</longcat_tool_call>`."""

    open = ("<longcat_tool_call>",)
    close = ("</longcat_tool_call>",)
    markers = (*open, *close)
    call_form = msgspec.structs.replace(
        HermesToolParser.call_form,
        trigger="<longcat_tool_call>",
        open='<longcat_tool_call>\n{"name": "',
        between='\n</longcat_tool_call>\n<longcat_tool_call>\n{"name": "',
        close="\n</longcat_tool_call>",
    )


class TrinityToolParser(HermesToolParser):
    """`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, also in reasoning, whose marks are
    dropped.
    """

    around = ("<think>", "</think>")

"""Tool calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...core.protocols.parsers import CallForm
from ..parsing.cursor import Read
from ..parsing.json_calls import JsonCallsParser, peek_after_space
from ..parsing.tagged_calls import TaggedCallsParser


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


class _LongCatTags(TaggedCallsParser):
    """Later models' calls, with arguments in tags."""

    open, close = "<longcat_tool_call>", "</longcat_tool_call>"
    name_end = ("\n", "<longcat_arg_key>", close)
    parameter, key_end = "<longcat_arg_key>", "</longcat_arg_key>"
    value_open = "<longcat_arg_value>"
    value_end = ("</longcat_arg_value>", "\n<longcat_arg_key>", f"\n{close}")
    newlines = False
    untyped = frozenset()


class LongCatToolParser(HermesToolParser):
    """`<longcat_tool_call>{"name": "f", "arguments": {…}}</longcat_tool_call>`, or in the marks `f`
    and `<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>…</longcat_arg_value>`.
    """

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

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools=tools)
        self._tagged = _LongCatTags(tools=tools)
        self._tagged.text, self._tagged.answer = self.text, self.answer

    def section(self, source: list[str], *, weak: bool) -> Read[None]:
        """Read calls. source: consumed text, which is content if no call follows."""
        if (yield from peek_after_space(self.text, source)) in ("{", "[", ""):
            yield from super().section(source, weak=weak)
        else:
            yield from self._tagged.call(source)


class TrinityToolParser(HermesToolParser):
    """`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, also in reasoning, whose marks are
    dropped.
    """

    around = ("<think>", "</think>")

"""Model families that write tool calls as JSON objects with a name and arguments."""

from __future__ import annotations

from typing import Any

from ...core.protocols.parsers import CallForm
from ..parsing.json_calls import JsonCallsParser

_FIRST = r"[ \t\r\n]*"


def _list_of_calls(open: str = "", close: str = "", **more: Any) -> CallForm:
    """`open[{"name": "f", "arguments": {…}}, …]close`; more: fields of `CallForm`."""
    return CallForm(
        trigger=open or "[",
        open=f"{open}[",
        begin='{"name": "{name}", "arguments": ',
        end="}",
        between=", ",
        close=f"]{close}",
        **more,
    )


class Llama3JsonToolParser(JsonCallsParser):
    """`{"name": "f", "parameters": {…}}`, also after `<|python_tag|>`; several with `; `."""

    open = markers = ("<|python_tag|>",)
    bare = "{"
    inline = ('{"name"', '{"type"')
    argument_keys = ("parameters", "arguments")
    call_form = CallForm(
        trigger='{"name"',
        open='{"name": "',
        begin='{name}", "parameters": ',
        end="}",
        between='; {"name": "',
        never=(*open, '{"type"'),
        never_first=_FIRST + r"\{",
    )


class XlamToolParser(JsonCallsParser):
    """`[{"name": "f", "arguments": {…}}]`, alone, after reasoning, fenced, or in other families'
    marks."""

    open = ("[TOOL_CALLS]", "<tool_call>")
    markers = open
    close = ("</tool_call>", "```")
    weak = ("```",)
    language = "json"
    bare = "[{"
    bare_after = ("</think>",)
    call_form = _list_of_calls(
        never=(*open, *bare_after),
        never_pattern=r"```(json)?[ \t\r\n]*[\[{]",
        never_first=_FIRST + r"[\[{]",
        only_first=True,
    )


class MiniMaxToolParser(JsonCallsParser):
    """`<tool_calls>`, then one `{"name": "f", "arguments": {…}}` per line, then `</tool_calls>`."""

    open = ("<tool_calls>",)
    close = ("</tool_calls>",)
    opaque = ("<think>", "</think>")
    recovers = True
    call_form = CallForm(
        trigger="<tool_calls>",
        open="<tool_calls>\n",
        begin='{"name": "{name}", "arguments": ',
        end="}\n",
        between="",
        close="</tool_calls>",
    )


class GraniteToolParser(JsonCallsParser):
    """`<|tool_call|>[{"name": "f", "arguments": {…}}]`, or `<tool_call>`, or the list."""

    open = ("<|tool_call|>", "<tool_call>", "<function_call>")
    markers = open
    close = ("</tool_call>",)
    bare = "["
    call_form = _list_of_calls(
        "<|tool_call|>",
        never=("<tool_call>", "<function_call>"),
        never_first=_FIRST + r"\[",
    )


class Granite20bFcToolParser(JsonCallsParser):
    """`<function_call> {"name": "f", "arguments": {…}}`, once a call."""

    open = ("<function_call>",)
    call_form = CallForm(
        trigger="<function_call>",
        open="<function_call> ",
        begin='{"name": "{name}", "arguments": ',
        end="}",
        between="\n<function_call> ",
    )


class InternLmToolParser(JsonCallsParser):
    """`<|action_start|><|plugin|>{"name": "f", "parameters": {…}}<|action_end|>`."""

    open = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    close = ("<|action_end|>",)
    argument_keys = ("parameters", "arguments")
    call_form = CallForm(
        trigger="<|action_start|>",
        open="<|action_start|><|plugin|>",
        begin='{"name": "{name}", "parameters": ',
        end="}",
        between="<|action_end|><|action_start|><|plugin|>",
        close="<|action_end|>",
    )


class JambaToolParser(JsonCallsParser):
    """`<tool_calls>[{"name": "f", "arguments": {…}}]</tool_calls>`."""

    open = ("<tool_calls>",)
    close = ("</tool_calls>",)
    markers = (*open, *close)
    call_form = _list_of_calls("<tool_calls>", "</tool_calls>")


class Phi4MiniJsonToolParser(JsonCallsParser):
    """`functools[{"name": "f", "arguments": {…}}]`, or `<|tool_call|>[…]<|/tool_call|>`."""

    open = ("<|tool_call|>",)
    close = ("<|/tool_call|>",)
    markers = (*open, *close)
    weak = ("functools",)
    argument_keys = ("arguments", "parameters")
    call_form = _list_of_calls(
        "<|tool_call|>", "<|/tool_call|>", never_pattern=r"functools[ \t\r\n]*[\[{]"
    )


class NemotronJsonToolParser(JsonCallsParser):
    """`<TOOLCALL>[{"name": "f", "arguments": {…}}]</TOOLCALL>`."""

    open, close = ("<TOOLCALL>",), ("</TOOLCALL>",)
    markers = (*open, *close)
    call_form = _list_of_calls("<TOOLCALL>", "</TOOLCALL>")


class HunyuanA13bToolParser(JsonCallsParser):
    """`<tool_calls>[{"name": "f", "arguments": {…}}]</tool_calls>`, not inside `<think>`."""

    open = ("<tool_calls>",)
    close = ("</tool_calls>",)
    opaque = ("<think>", "</think>")
    call_form = _list_of_calls("<tool_calls>", "</tool_calls>")


class ApertusToolParser(JsonCallsParser):
    """`<|tools_prefix|>[{"f": {…}}, {"g": {…}}]<|tools_suffix|>`: the key is the name."""

    open, close = ("<|tools_prefix|>",), ("<|tools_suffix|>",)
    markers = (*open, *close)
    keyed = True
    call_form = CallForm(
        trigger="<|tools_prefix|>",
        open="<|tools_prefix|>[",
        begin='{"{name}": ',
        end="}",
        between=", ",
        close="]<|tools_suffix|>",
    )


class GigaChat3ToolParser(JsonCallsParser):
    """`<|message_sep|>`, `function call<|role_sep|>`, then `{"name": "f", "arguments": {…}}`; or
    `<|function_call|>{…}`. One call.
    """

    open = ("function call<|role_sep|>", "<|function_call|>")
    close = ("<|message_sep|>", "</s>")
    around = ("<|message_sep|>",)
    markers = ("<|message_sep|>", "<|role_sep|>", "<|function_call|>")
    ends_turn = True


class CohereToolParser(JsonCallsParser):
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {…}}]`, then
    `<|END_ACTION|>`.
    """

    open, close = ("<|START_ACTION|>",), ("<|END_ACTION|>",)
    markers = (*open, *close)
    id_keys, name_keys, argument_keys = ("tool_call_id",), ("tool_name",), ("parameters",)

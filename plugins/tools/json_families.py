"""Model families that write tool calls as JSON objects with a name and arguments."""

from __future__ import annotations

from ..parsing.json_calls import JsonCallsParser


class Llama3JsonToolParser(JsonCallsParser):
    """`{"name": "f", "parameters": {…}}`, also after `<|python_tag|>`; several with `; `."""

    open = markers = ("<|python_tag|>",)
    bare = "{"
    inline = ('{"name"', '{"type"')
    argument_keys = ("parameters", "arguments")


class XlamToolParser(JsonCallsParser):
    """`[{"name": "f", "arguments": {…}}]`, alone, after a thought, fenced, or in others' marks."""

    open = ("[TOOL_CALLS]", "<tool_call>")
    markers = open
    close = ("</tool_call>", "```")
    weak = ("```",)
    language = "json"
    bare = "[{"
    bare_after = ("</think>",)


class MiniMaxToolParser(JsonCallsParser):
    """`<tool_calls>`, then `{"name": "f", "arguments": {…}}` a line, then `</tool_calls>`."""

    open = ("<tool_calls>",)
    close = ("</tool_calls>",)
    opaque = ("<think>", "</think>")
    recovers = True


class GraniteToolParser(JsonCallsParser):
    """`<|tool_call|>[{"name": "f", "arguments": {…}}]`, or `<tool_call>`, or the list."""

    open = ("<|tool_call|>", "<tool_call>", "<function_call>")
    markers = open
    close = ("</tool_call>",)
    bare = "["


class Granite20bFcToolParser(JsonCallsParser):
    """`<function_call> {"name": "f", "arguments": {…}}`, once a call."""

    open = ("<function_call>",)


class InternLmToolParser(JsonCallsParser):
    """`<|action_start|><|plugin|>{"name": "f", "parameters": {…}}<|action_end|>`."""

    open = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    close = ("<|action_end|>",)
    argument_keys = ("parameters", "arguments")


class JambaToolParser(JsonCallsParser):
    """`<tool_calls>[{"name": "f", "arguments": {…}}]</tool_calls>`."""

    open = ("<tool_calls>",)
    close = ("</tool_calls>",)
    markers = (*open, *close)


class Phi4MiniJsonToolParser(JsonCallsParser):
    """`functools[{"name": "f", "arguments": {…}}]`, or `<|tool_call|>[…]<|/tool_call|>`."""

    open = ("<|tool_call|>",)
    close = ("<|/tool_call|>",)
    markers = (*open, *close)
    weak = ("functools",)
    argument_keys = ("arguments", "parameters")


class HunyuanA13bToolParser(JsonCallsParser):
    """`<tool_calls>[{"name": "f", "arguments": {…}}]</tool_calls>`, not inside `<think>`."""

    open = ("<tool_calls>",)
    close = ("</tool_calls>",)
    opaque = ("<think>", "</think>")

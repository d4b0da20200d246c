"""Model families that write arguments as objects of their own kind, not as JSON."""

from __future__ import annotations

from ..parsing.object_calls import ObjectCallsParser


class Gemma4ToolParser(ObjectCallsParser):
    """`<|tool_call>call:f{a:<|"|>text<|"|>,b:[1,2],c:{d:true}}<tool_call|>`."""

    open, close, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers = (open, close, quote)


class FunctionGemmaToolParser(ObjectCallsParser):
    """`<start_function_call>call:f{a:<escape>text<escape>,b:<escape>2<escape>}<end_function_call>`.
    The schema says which values are text.
    """

    open, close, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    quoted = frozenset()
    markers = (open, close, quote)

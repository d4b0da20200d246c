"""Families whose calls are messages or blocks: their reasoning parsers pass on what these parsers
read.
"""

from __future__ import annotations

from ..parsing.json_calls import JsonCallsParser
from ..parsing.recipients import MARKERS
from ..parsing.tagged_calls import TaggedCallsParser


class MuseToolParser(TaggedCallsParser):
    """`<atem:function_calls>`, then `<atem:invoke name="f"><atem:parameter name="a">…
    </atem:parameter></atem:invoke>`, and `</atem:function_calls>`, in messages to a tool.

    Use it with the reasoning parser `muse`, which reads the messages.
    """

    around = ("<atem:function_calls>", "</atem:function_calls>")
    open, close = "<atem:invoke name=", "</atem:invoke>"
    parameter, value_end = "<atem:parameter name=", ("</atem:parameter>",)
    newlines = False
    untyped = frozenset()
    markers = (*MARKERS, *around)

    def name_of(self, header: str) -> str:
        """Return the name; for `f.f` with a known tool `f`, `f`."""
        name = super().name_of(header)
        first, dot, second = name.partition(".")
        return first if dot and first == second and first in self.schemas else name


class MuseGlimmerToolParser(MuseToolParser):
    """As `muse`, but values are JSON where they read as such, whatever the schema says.

    Use it with the reasoning parser `muse_glimmer`, which reads the messages.
    """

    def argument(self, name: str, header: str) -> tuple[str, frozenset[str]]:
        return super().argument(name, header)[0], frozenset()


class InklingToolParser(JsonCallsParser):
    """`<|content_invoke_tool_json|>{"name": "f", "args": {…}}<|end_message|>`.

    Use it with the reasoning parser `inkling`, which reads the other blocks.
    """

    open, close = ("<|content_invoke_tool_json|>",), ("<|end_message|>",)
    argument_keys = ("args",)
    markers = (*open, *close)

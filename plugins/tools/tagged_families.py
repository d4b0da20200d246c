"""Model families that write a call's arguments in tags of their own."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import ClassVar

from ...core.protocols.parsers import ArgumentForm, CallForm
from ..parsing.cursor import Marks, Read
from ..parsing.tagged_calls import TaggedCallsParser
from ..parsing.tool_machine import ToolMachine


def _functions(around: tuple[str, str], never: tuple[str, ...]) -> CallForm:
    begin, end = around
    return CallForm(
        trigger=begin,
        open=f"{begin}\n",
        begin="<function={name}>\n",
        end="</function>",
        between=f"\n{end}\n{begin}\n",
        close=f"\n{end}",
        quoted=False,
        arguments=ArgumentForm(
            begin="<parameter={key}>\n", end="\n</parameter>\n", plain=True, never=never
        ),
        never=("<function=",),
    )


def _keys_and_values(open: str, close: str, never: tuple[str, ...]) -> CallForm:
    arguments = ArgumentForm(
        begin="<arg_key>{key}</arg_key><arg_value>", end="</arg_value>", plain=True, never=never
    )
    return CallForm(
        trigger=open,
        open=open,
        begin="{name}",
        end=close,
        between=open,
        quoted=False,
        arguments=arguments,
    )


class Qwen3CoderToolParser(TaggedCallsParser):
    """`<tool_call><function=f><parameter=a>…</parameter></function></tool_call>`, on separate
    lines."""

    around = ("<tool_call>", "</tool_call>")
    open, close = "<function=", "</function>"
    parameter = "<parameter="
    value_end: ClassVar[tuple[str, ...]] = ("</parameter>", "\n<parameter=", "\n</function>")
    markers: ClassVar[tuple[str, ...]] = around
    call_form = _functions(around, value_end)


class SeedOssToolParser(Qwen3CoderToolParser):
    """`<seed:tool_call><function=f><parameter=a>…</parameter></function></seed:tool_call>`, not
    inside `<seed:think>`.
    """

    around = ("<seed:tool_call>", "</seed:tool_call>")
    opaque = ("<seed:think>", "</seed:think>")
    markers = (*around, *opaque)
    call_form = _functions(around, Qwen3CoderToolParser.value_end)


class MiniMaxM2ToolParser(TaggedCallsParser):
    """`<minimax:tool_call><invoke name="f"><parameter name="a">…</parameter></invoke>…`."""

    around = ("<minimax:tool_call>", "</minimax:tool_call>")
    open, close = "<invoke name=", "</invoke>"
    parameter, value_end = "<parameter name=", ("</parameter>",)
    newlines = False
    markers = around
    call_form = CallForm(
        trigger=around[0],
        open="<minimax:tool_call>\n",
        begin='<invoke name="{name}">\n',
        end="</invoke>\n",
        between="",
        close=around[1],
        quoted=False,
        arguments=ArgumentForm(
            begin='<parameter name="{key}">', end="</parameter>\n", plain=True, never=value_end
        ),
        never=("<invoke name=",),
    )


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
    call_form = CallForm(
        trigger=around[0],
        open="<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>",
        begin='<steptml:invoke name="{name}">\n',
        end="</steptml:invoke><｜tool_call_end｜>\n",
        between="<｜tool_call_begin｜>function<｜tool_sep｜>",
        close=around[1],
        quoted=False,
        arguments=ArgumentForm(
            begin='<steptml:parameter name="{key}">',
            end="</steptml:parameter>\n",
            plain=True,
            never=value_end,
        ),
        never=(lead, open),
    )


class Glm45ToolParser(TaggedCallsParser):
    """`<tool_call>f`, then `<arg_key>a</arg_key><arg_value>…</arg_value>` on lines, and
    `</tool_call>`. Strings are plain, other values JSON.
    """

    open, close = "<tool_call>", "</tool_call>"
    name_end = ("\n", "<arg_key>", "</tool_call>")
    parameter, key_end = "<arg_key>", "</arg_key>"
    value_open = "<arg_value>"
    value_end = ("</arg_value>", "\n<arg_key>", "\n</tool_call>")
    newlines = False
    untyped = frozenset()
    markers = (open, close, parameter, key_end, value_open, value_end[0])
    call_form = CallForm(
        trigger=open,
        open="<tool_call>",
        begin="{name}\n",
        end="</tool_call>",
        between="\n<tool_call>",
        quoted=False,
        arguments=ArgumentForm(
            begin="<arg_key>{key}</arg_key>\n<arg_value>",
            end="</arg_value>\n",
            plain=True,
            never=value_end,
        ),
    )


class Glm47ToolParser(Glm45ToolParser):
    """`<tool_call>f<arg_key>a</arg_key><arg_value>…</arg_value></tool_call>`, also on lines.
    Strings are plain, other values JSON.
    """

    call_form = _keys_and_values("<tool_call>", "</tool_call>", Glm45ToolParser.value_end)


class IQuestQ1ToolParser(Glm47ToolParser):
    """`<iquest_tool_call>f<arg_key>a</arg_key><arg_value>…</arg_value></iquest_tool_call>`, also on
    lines. Strings are plain, other values JSON.
    """

    open, close = "<iquest_tool_call>", "</iquest_tool_call>"
    name_end = ("\n", "<arg_key>", close)
    value_end = ("</arg_value>", "\n<arg_key>", f"\n{close}")
    markers = (open, close, "<arg_key>", "</arg_key>", "<arg_value>", value_end[0])
    call_form = _keys_and_values(open, close, value_end)


class MiMoToolParser(Qwen3CoderToolParser):
    """`<tool_call><function=f><parameter=a>…</parameter></function></tool_call>`; newlines belong
    to values.
    """

    value_end = ("</parameter>",)
    newlines = False
    call_form = CallForm(
        trigger="<tool_call>",
        open="<tool_call>",
        begin="<function={name}>",
        end="</function>",
        between="</tool_call><tool_call>",
        close="</tool_call>",
        quoted=False,
        arguments=ArgumentForm(
            begin="<parameter={key}>", end="</parameter>", plain=True, never=value_end
        ),
        never=("<function=",),
    )


class PoolsideToolParser(Glm45ToolParser):
    """`<tool_call>f`, then `<arg_key>a</arg_key><arg_value>…</arg_value>`, and `</tool_call>`. Of
    an argument that is there twice, the first counts.
    """

    first_counts = True


_BEGIN, _END = Marks("<tool_calls"), Marks(">")
_SUFFIX = re.compile(r"(:[\w.\-]+)?")
_MAX_SUFFIX = 32


class Hy3ToolParser(ToolMachine):
    """`<tool_calls>`, then `<tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>…</arg_value>
    </tool_call>` on lines, then `</tool_calls>`. Every tag may have the same suffix, as in
    `<tool_calls:opensource>`. Text after the calls is dropped.
    """

    def read(self) -> Read[None]:
        text, emit = self.text, self.answer.emit
        while mark := (yield from text.until(_BEGIN, emit)):
            suffix = yield from text.until_within(_END, _MAX_SUFFIX)
            if suffix is not None and _SUFFIX.fullmatch(suffix[0]):
                block = _suffixed(suffix[0])()
                block.text, block.answer, block.schemas = text, self.answer, self.schemas
                yield from block.read()
                return
            if suffix is not None:
                text.back("".join(suffix))
            emit(mark)


class Hy4ToolParser(Hy3ToolParser):
    """`<tool_calls:SUF><tool_call:SUF>f<arg_key:SUF>a</arg_key:SUF><arg_value:SUF>…` and closing
    tags, with a suffix that the checkpoint sets, or none. Text after the calls is dropped.
    """


@lru_cache(maxsize=64)
def _suffixed(suffix: str) -> type[TaggedCallsParser]:
    """Return the parser of calls whose tags have this suffix."""

    def tag(name: str) -> str:
        return f"<{name}{suffix}>"

    class Block(TaggedCallsParser):
        around = (tag("tool_calls"), tag("/tool_calls"))
        last = (around[1],)
        open, close = tag("tool_call"), tag("/tool_call")
        parameter, key_end = tag("arg_key"), tag("/arg_key")
        name_end = (tag("tool_sep"), parameter, close)
        value_open = tag("arg_value")
        value_end = (tag("/arg_value"), f"\n{parameter}", f"\n{close}")
        newlines = False
        untyped = frozenset()

    return Block

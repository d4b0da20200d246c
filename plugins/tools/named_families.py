"""Model families that write a tool call's name in marks, before its arguments."""

from __future__ import annotations

import secrets
import string

from ...core.protocols.parsers import CallForm
from ..parsing.cursor import SPACES, Read
from ..parsing.json_calls import JsonCallsParser
from ..parsing.named_calls import NamedCallsParser, NamedForm, named_call

_LETTERS = string.ascii_letters + string.digits
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")


class DeepSeekV3ToolParser(NamedCallsParser):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, the arguments in a json fence, and
    `<｜tool▁call▁end｜>`.
    """

    form = NamedForm(
        open=("<｜tool▁call▁begin｜>",),
        before_name="function<｜tool▁sep｜>",
        name_end=("\n", "```", "{"),
        fence="```json",
        fence_end="\n```",
        close=("<｜tool▁call▁end｜>",),
        around=_DEEPSEEK,
    )
    around = _DEEPSEEK
    markers = (*around, *form.open, *form.close, "<｜tool▁sep｜>")
    call_form = CallForm(
        trigger=around[0],
        open="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        begin="{name}\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        between="\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        close=around[1],
        quoted=False,
        never=form.open,
    )


class DeepSeekV31ToolParser(NamedCallsParser):
    """`<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`."""

    form = NamedForm(
        open=("<｜tool▁call▁begin｜>",),
        name_end=("<｜tool▁sep｜>",),
        close=("<｜tool▁call▁end｜>",),
        around=_DEEPSEEK,
    )
    around = _DEEPSEEK
    markers = (*around, *form.open, *form.close, "<｜tool▁sep｜>")
    call_form = CallForm(
        trigger=around[0],
        open="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        begin="{name}<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        between="<｜tool▁call▁begin｜>",
        close=around[1],
        quoted=False,
        never=form.open,
    )


class _KimiForm(NamedForm):
    def name_of(self, header: str) -> tuple[str, str]:
        """Parse `functions.NAME:NUMBER`, which is also the call's id."""
        id = header.strip()
        name, _, number = id.rpartition(":")
        return (name if number.isdecimal() else id).removeprefix("functions."), id


class KimiK2ToolParser(NamedCallsParser):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`."""

    form = _KimiForm(
        open=("<|tool_call_begin|>",),
        name_end=("<|tool_call_argument_begin|>",),
        close=("<|tool_call_end|>",),
        around=_KIMI,
    )
    around = _KIMI
    last = _KIMI[1]
    markers = (*around, *form.open, *form.name_end.texts, *form.close)
    call_form = CallForm(
        trigger=around[0],
        open="<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        begin="{name}:{number}<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        between="<|tool_call_begin|>functions.",
        close=around[1],
        quoted=False,
        never=form.open,
    )


def _plamo(*names: str) -> str:
    return "".join(f"<|plamo:{name}:plamo|>" for name in names)


class Plamo3ToolParser(NamedCallsParser):
    """A request in its own marks, with the name and the arguments in marks inside."""

    around = (_plamo("begin_tool_requests"), _plamo("end_tool_requests"), "<|plamo:tag|>")
    last = around[1]
    form = NamedForm(
        open=(_plamo("begin_tool_request"),),
        before_name=_plamo("begin_tool_name"),
        name_end=(_plamo("end_tool_name", "begin_tool_arguments"),),
        fence="<|plamo:constrain|>json<|plamo:msg|>",
        close=(_plamo("end_tool_arguments", "end_tool_request"),),
        around=around,
    )
    markers = ("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:msg|>", "<|plamo:tag|>")
    call_form = CallForm(
        trigger=around[0],
        open=around[0] + form.open[0] + _plamo("begin_tool_name"),
        begin="{name}" + form.name_end.texts[0] + form.fence.texts[0],
        end=form.close[0],
        between=form.open[0] + _plamo("begin_tool_name"),
        close=around[1],
        quoted=False,
        never=form.open,
    )


class _MistralForm(NamedForm):
    def name_of(self, header: str) -> tuple[str, str]:
        name, _, id = header.partition("[CALL_ID]")
        return name.strip(), id.strip()


class MistralToolParser(JsonCallsParser):
    """`[TOOL_CALLS][{"name": "f", "arguments": {…}}]`; since v11 `[TOOL_CALLS]f[ARGS]{…}`."""

    open = ("[TOOL_CALLS]",)
    markers = (*open, "[ARGS]", "[CALL_ID]")
    ends_turn = True
    form = _MistralForm(open=open, name_end=("[ARGS]", "{"), name_alone=True)
    call_form = (
        CallForm(
            trigger="[TOOL_CALLS]",
            open="[TOOL_CALLS][",
            begin='{"name": "{name}", "arguments": ',
            end="}",
            between=", ",
            close="]",
        ),
        CallForm(
            trigger="[TOOL_CALLS]",
            open="[TOOL_CALLS]",
            begin="{name}[ARGS]",
            end="",
            between="[TOOL_CALLS]",
            quoted=False,
        ),
    )

    @staticmethod
    def new_id() -> str:
        """Return nine letters and digits, as the family's templates require."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def section(self, source: list[str], *, weak: bool) -> Read[None]:
        """Read calls after the mark, in either form; the mark may be repeated."""
        while True:
            source.append((yield from self.text.run(SPACES)))
            if not (again := (yield from self.text.accept(self.form.close_or_open))):
                break
            source.append(again)
        if (yield from self.text.peek()) in ("[", "{"):
            yield from super().section(source, weak=weak)
        else:
            yield from named_call(self, self.form, source)

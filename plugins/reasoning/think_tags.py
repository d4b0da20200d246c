"""Families with reasoning between tags, before the content."""

from __future__ import annotations

import re

from ..parsing.cursor import Marks, Read
from ..parsing.escapes import NewlineEscapes
from ..parsing.tagged_reasoning import TaggedReasoningParser


class Qwen3Reasoning(TaggedReasoningParser):
    """`<think>…</think>`, opened by the model or the template.

    Without reasoning (the template closed it), the text is content, unless the model still begins
    with `<think>`. A tool call also ends the reasoning, because some models of the family omit the
    closing mark before it.
    """

    markers = ("<think>", "</think>")
    call = tuple(
        "<tool_call>" + newline + begin for newline in ("", "\n") for begin in ("{", "<function=")
    )


class ThinkTagsReasoning(TaggedReasoningParser):
    """`<think>…</think>`: text is reasoning only after the opening mark."""

    markers = ("<think>", "</think>")
    begins_inside = False
    always = True


class DeepSeekR1Reasoning(TaggedReasoningParser):
    """`<think>…</think>`, always; the template may have opened it."""

    markers = ("<think>", "</think>")
    always = True


class DeepSeekV3Reasoning(TaggedReasoningParser):
    """`…</think>`: the template opens or closes the reasoning."""

    markers = ("<think>", "</think>")
    thinking_switch = ("thinking", False)


class Glm45Reasoning(TaggedReasoningParser):
    """`<think>…</think>`: the template or the model opens the reasoning, or there is none."""

    markers = ("<think>", "</think>")
    begins_inside = False


class Glm47Reasoning(TaggedReasoningParser):
    """`…</think>`: the template or the model opens the reasoning. A call ends it, too."""

    markers = ("<think>", "</think>")
    call = ("<tool_call>",)


class NemotronReasoning(Glm47Reasoning):
    """`…</think>`: the template or the model opens the reasoning. A call ends it, too. With
    `force_nonempty_content` in `chat_template_kwargs`, the reasoning of an output without content
    is its content, too.
    """

    template_options = ("force_nonempty_content",)
    force_nonempty_content = False

    def __init__(self, *, thinking: bool = True) -> None:
        super().__init__(thinking=thinking)
        self._kept: list[str] = []
        self._has_content = False

    def read(self) -> Read[None]:
        yield from super().read()
        if self.force_nonempty_content and not self._has_content:
            super().emit("".join(self._kept))

    def emit_reasoning(self, text: str) -> None:
        super().emit_reasoning(text)
        if self.force_nonempty_content:
            self._kept.append(text)

    def emit(self, text: str) -> None:
        super().emit(text)
        self._has_content = self._has_content or bool(text.strip())


class GigaChat35Reasoning(TaggedReasoningParser):
    """`…</think>`: the template opens the reasoning, if the request turns it on."""

    markers = ("<think>", "</think>")
    thinking_switch = ("reasoning", False)


class Holo2Reasoning(TaggedReasoningParser):
    """`…</think>`: the template opens or closes the reasoning."""

    markers = ("<think>", "</think>")
    thinking_switch = ("thinking", True)


class KimiK2Reasoning(TaggedReasoningParser):
    """`…</think>`: the template or the model opens the reasoning. Calls end it, too."""

    call = ("<|tool_calls_section_begin|>",)
    markers = ("<think>", "</think>", *call)
    thinking_switch = ("thinking", True)


class DeepSeekV4Reasoning(TaggedReasoningParser):
    """`…</think>`: the template opens or closes the reasoning. Calls end it, too."""

    call = (
        "<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>", "<｜DSML｜ calls>"
    )  # fmt: skip
    markers = ("<think>", "</think>", "｜DSML｜")
    thinking_switch = ("thinking", True)


class Step3p5Reasoning(TaggedReasoningParser):
    """`…</think>`: the template has opened the reasoning. A call ends it, too."""

    call = ("<tool_call>",)
    markers = ("<think>", "</think>")
    always = True


class IQuestQ1Reasoning(TaggedReasoningParser):
    """`…</think>`: the template opens or closes the reasoning. A call ends it, too."""

    call = ("<iquest_tool_call>",)
    markers = ("<think>", "</think>", *call)


class PoolsideReasoning(TaggedReasoningParser):
    """`<think>…</think>`, opened by the model, if the request turns reasoning on."""

    markers = ("<think>", "</think>")
    begins_inside = False
    thinking_switch = ("enable_thinking", False)


class Plamo3Reasoning(TaggedReasoningParser):
    """`…<|plamo:end_think:plamo|>`: the template opens or closes the reasoning. Calls end it,
    too."""

    open, close = ("<|plamo:begin_think:plamo|>",), ("<|plamo:end_think:plamo|>",)
    call = ("<|plamo:begin_tool_requests:plamo|>",)
    markers = ("<|plamo:begin_", "<|plamo:end_", ":plamo|>")


class KimiReasoning(TaggedReasoningParser):
    """`◁think▷…◁/think▷`, in plain text."""

    open, close = ("◁think▷",), ("◁/think▷",)
    begins_inside = False
    always = True


class Ernie45Reasoning(TaggedReasoningParser):
    """`…</think>`, then `<response>…</response>` or bare content."""

    markers = ("<think>", "</think>", "<response>", "</response>")
    always = True
    answer_open, answer_close = ("<response>",), ("</response>",)


class MiniMaxM2Reasoning(TaggedReasoningParser):
    """`…</think>`: the template has opened the reasoning."""

    markers = ("<think>", "</think>")
    always = True


class MiniMaxM2AppendThinkReasoning(TaggedReasoningParser):
    """Leaves the reasoning in the content, after the template's `<think>`, for clients that send
    the text back as it is."""

    markers = ("<think>", "</think>")
    always = True

    def read(self) -> Read[None]:
        if not (yield from self.text.peek()):
            return
        yield from self.text.accept(Marks("<think>"))
        self.emit("<think>")
        self.emit((yield from self.text.until(Marks("</think>"), self.emit)))
        self.reasoning_ended = True
        yield from self.text.until(Marks(), self.emit)


class Step3Reasoning(TaggedReasoningParser):
    """`…</think>`: the template has opened the reasoning."""

    markers = ("<think>", "</think>")
    always = True


class Olmo3Reasoning(TaggedReasoningParser):
    """`…</think>`: the template has opened the reasoning; the tags are plain text."""

    always = True


class SeedOssReasoning(TaggedReasoningParser):
    """`<seed:think>…</seed:think>`, which the model opens. Calls inside it are reasoning."""

    open, close = ("<seed:think>",), ("</seed:think>",)
    markers = ("<seed:think>", "</seed:think>")
    begins_inside = False


class MistralReasoning(TaggedReasoningParser):
    """`[THINK]…[/THINK]` anywhere, if the system prompt has the model reason."""

    open, close = ("[THINK]",), ("[/THINK]",)
    markers = ("[THINK]", "[/THINK]")
    begins_inside = False
    always = True
    anywhere = True


class MiniMaxM3Reasoning(TaggedReasoningParser):
    """`<mm:think>…</mm:think>` anywhere, unless the template opens or closes the reasoning."""

    open, close = ("<mm:think>",), ("</mm:think>",)
    markers = (*open, *close)
    begins_inside = False
    always = True
    anywhere = True


class Gemma4Reasoning(TaggedReasoningParser):
    """`<|channel>thought`, a newline, `…<channel|>`, opened by the model, also after content. A
    call ends it, too."""

    open, close = ("<|channel>thought",), ("<channel|>",)
    first_open = ("thought\n",)
    call = ("<|tool_call>",)
    markers = ("<|channel>", *close, *call)
    begins_inside = False
    anywhere = True
    thinking_switch = ("enable_thinking", False)


class ApertusReasoning(TaggedReasoningParser):
    """`<|inner_prefix|>…<|inner_suffix|>` anywhere, without the calls inside, which the tool parser
    gets."""

    open, close = ("<|inner_prefix|>",), ("<|inner_suffix|>",)
    call = ("<|tools_prefix|>",)
    call_end = "<|tools_suffix|>"
    markers = (*open, *close, *call, call_end)
    begins_inside = False
    always = True

    def read(self) -> Read[None]:
        text, begin = self.text, Marks(*self.open, *self.close)
        mark = self.open[0] if self._inside else (yield from text.accept(begin))
        ends = Marks(*self.close, *self.call)
        while True:
            if mark in self.open:
                while (end := (yield from text.until(ends, self.emit_reasoning))) in self.call:
                    self.reasoning_ended = True
                    self.emit(end)
                    self.emit((yield from text.until(Marks(self.call_end), self.emit)))
                if not end:
                    return
            self.reasoning_ended = True
            mark = yield from text.until(begin, self.emit)
            if not mark:
                return


class MiniCpmVReasoning(TaggedReasoningParser):
    """`…</think>`, with newlines written as escapes: the template or the model opens the reasoning,
    or there is none. A call ends it, too."""

    call = ("<tool_call>",)
    markers = ("<think>", "</think>", "<|im_end|>")

    def __init__(self, *, thinking: bool = True) -> None:
        self._reasoning = NewlineEscapes(super().emit_reasoning)
        self._content = NewlineEscapes(super().emit)
        super().__init__(thinking=thinking)

    def read(self) -> Read[None]:
        yield from super().read()
        self._reasoning.finish()
        self._content.finish()

    def emit_reasoning(self, text: str) -> None:
        self._reasoning.add(text)

    def emit(self, text: str) -> None:
        self._reasoning.finish()
        self._content.add(text)


class Hy3Reasoning(TaggedReasoningParser):
    """`…</think>`: the template opens or closes the reasoning. Calls end it, too. Every tag may
    have the same suffix, as in `<think:opensource>`, which is that of the prompt's last tag."""

    call = ("<tool_calls>",)
    markers = ("<think>", "</think>", "<tool_calls>")
    begins_inside = False
    always = True

    def see_prompt_end(self, text: str) -> None:
        if match := _LAST_TAG.search(text[-_LONGEST_TAG:]):
            suffix = match[1]
            self.open, self.close = (f"<think{suffix}>",), (f"</think{suffix}>",)
            self.call = (f"<tool_calls{suffix}>",)
        super().see_prompt_end(text)


_LAST_TAG = re.compile(r"</?think((?::[\w.\-]{1,32})?)>\s*$")
_LONGEST_TAG = 64


class K2HorizonReasoning(TaggedReasoningParser):
    """`…</ifm|think>`, `…</ifm|think_fast>` or `…</ifm|think_faster>`: the template opens the
    reasoning, by the effort. Calls end it, too."""

    open: tuple[str, ...] = ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>")
    close = ("</ifm|think>",)
    call = ("<ifm|tool_calls>",)
    markers = (*open, "</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>", *call)
    always = True
    thinking_switch = ("reasoning_effort", True)

    def see_prompt_end(self, text: str) -> None:
        for mark in self.open:
            if text.rstrip().endswith(mark):
                self.open, self.close = (mark,), (mark.replace("<", "</"),)
        super().see_prompt_end(text)


class GraniteReasoning(TaggedReasoningParser):
    """`Here is my thought process: … Here is my response: …`."""

    open = ("Here is my thought process:", "Here's my thought process:")
    close = ("Here is my response:", "Here's my response:")
    space = " \n"
    begins_inside = False
    thinking_switch = ("thinking", False)


class HunyuanA13bReasoning(TaggedReasoningParser):
    """`<think>…</think>`, then `<answer>…</answer>`, in plain text."""

    begins_inside = False
    answer_open, answer_close = ("<answer>",), ("</answer>",)


class IdentityReasoning(TaggedReasoningParser):
    """No reasoning: all text is content."""

    def __init__(self, *, thinking: bool = True) -> None:
        super().__init__(thinking=False)

    def see_prompt_end(self, text: str) -> None:
        """Ignore the prompt."""

    def read(self) -> Read[None]:
        yield from self.text.until(Marks(), self.emit)

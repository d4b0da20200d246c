"""Families whose thought stands between tags, before the answer."""

from __future__ import annotations

from ..parsing.cursor import Marks, Read
from ..parsing.thought import ThoughtParser


class Qwen3Reasoning(ThoughtParser):
    """`<think>…</think>`, whether the model or the template opens it.

    Not thinking (the template closed the thought): the text is the answer, unless the model begins
    with `<think>` nevertheless.
    """

    markers = ("<think>", "</think>")


class ThinkTagsReasoning(ThoughtParser):
    """For models that think when they like: text is thought only where `<think>` begins it."""

    markers = ("<think>", "</think>")
    begins_inside = False
    always = True


class DeepSeekR1Reasoning(ThoughtParser):
    """`<think>…</think>`, always, and the template may have opened it: DeepSeek-R1, QwQ."""

    markers = ("<think>", "</think>")
    always = True


class DeepSeekV3Reasoning(ThoughtParser):
    """DeepSeek-V3.1: the template opens or closes `<think>`, by `thinking`, which is off unless
    asked for.
    """

    markers = ("<think>", "</think>")
    thinking_switch = ("thinking", False)


class Glm45Reasoning(ThoughtParser):
    """GLM-4.5: the model writes `<think>` itself, after a newline, or does without."""

    markers = ("<think>", "</think>")
    begins_inside = False


class MiniMaxM2Reasoning(ThoughtParser):
    """MiniMax-M2: the template has written `<think>`, the model writes `</think>`."""

    markers = ("<think>", "</think>")
    always = True


class MiniMaxM2AppendThinkReasoning(ThoughtParser):
    """MiniMax-M2 with its thought left in the answer, and the `<think>` of the template before it,
    for clients that send the text back as it is.
    """

    markers = ("<think>", "</think>")
    always = True

    def read(self) -> Read[None]:
        """All of it is content."""
        if not (yield from self.text.peek()):
            return
        yield from self.text.accept(Marks("<think>"))
        self.say("<think>")
        self.say((yield from self.text.until(Marks("</think>"), self.say)))
        self.reasoning_ended = True
        yield from self.text.until(Marks(), self.say)


class Step3Reasoning(ThoughtParser):
    """Step-3: all is thought up to `</think>`."""

    markers = ("<think>", "</think>")
    always = True


class Olmo3Reasoning(ThoughtParser):
    """OLMo 3 Think: the template has written `<think>`; the tags are plain text."""

    always = True


class MistralReasoning(ThoughtParser):
    """Magistral: `[THINK]…[/THINK]`, when the system prompt asks for it."""

    open, close = ("[THINK]",), ("[/THINK]",)
    markers = ("[THINK]", "[/THINK]")
    begins_inside = False
    always = True


class GraniteReasoning(ThoughtParser):
    """Granite 3.2: `Here is my thought process: … Here is my response: …`, by `thinking`, which is
    off unless asked for.
    """

    open = ("Here is my thought process:", "Here's my thought process:")
    close = ("Here is my response:", "Here's my response:")
    space = " \n"
    begins_inside = False
    thinking_switch = ("thinking", False)


class HunyuanA13bReasoning(ThoughtParser):
    """Hunyuan-A13B: `<think>…</think>`, then `<answer>…</answer>`, in plain text."""

    begins_inside = False
    answer_open, answer_close = "<answer>", "</answer>"


class IdentityReasoning(ThoughtParser):
    """No thought: all is answer."""

    def __init__(self, *, thinking: bool = True) -> None:
        super().__init__(thinking=False)

    def read(self) -> Read[None]:
        """Pass it on."""
        yield from self.text.until(Marks(), self.say)

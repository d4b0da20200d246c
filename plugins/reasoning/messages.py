"""Families that write reasoning and content as separate messages or blocks."""

from __future__ import annotations

from typing import ClassVar

from ...core.protocols.parsers import CallText, Content, PlainText, Reasoning
from ..parsing import recipients
from ..parsing.cursor import EmitText, Marks, Read, StreamingParser
from ..parsing.harmony import MARKERS as HARMONY_MARKERS
from .harmony import HarmonyReasoning


class MessagesReasoning(StreamingParser):
    """Passes on reasoning, content, and the calls for the family's tool parser."""

    thinking_switch: ClassVar[tuple[str, bool]]

    def __init__(self, *, thinking: bool = True) -> None:
        self.reasoning_ended = False
        """Whether content or a call has begun; stays true."""
        super().__init__()

    def emit_reasoning(self, text: str) -> None:
        if text:
            self.events.append(Reasoning(text))

    def emit(self, text: str) -> None:
        if text:
            self.events.append(Content(text))

    def answer(self, text: str) -> None:
        """Pass on a message to the user, in which quoted calls are text."""
        if text:
            self.events.append(PlainText(text))

    def pass_on(self, text: str) -> None:
        if text:
            self.events.append(CallText(text))


_MESSAGE_END = Marks(*recipients.END.texts, *recipients.BARE.texts)


class MuseReasoning(MessagesReasoning):
    """` to=self<|message|>…<|eom|>`, then messages to the user, and to tools, whose text is for the
    tool parser `muse`.
    """

    markers = recipients.MARKERS
    thinking_switch = ("reasoning_strength", True)
    to_user: ClassVar[frozenset[str]] = frozenset({"user", "commentary"})
    to_none: ClassVar[frozenset[str]] = frozenset({"developer"})
    """Recipients of hidden messages."""
    silent: ClassVar[str] = "self"
    """Recipient of a message whose header names none."""

    def read(self) -> Read[None]:
        """Read messages; other text is content."""
        text = self.text
        mark = yield from text.accept(recipients.BEGIN)
        to = yield from recipients.recipient(text)
        while True:
            if to is None:
                self.emit(mark)
            emit, bare = self._speaker(to), None
            end = yield from text.until(_MESSAGE_END, emit)
            while end in recipients.BARE.texts:
                bare, source = yield from recipients.bare_recipient(text)
                if bare is not None:
                    break
                emit(end + source)
                end = yield from text.until(_MESSAGE_END, emit)
            if bare is not None:
                mark, to = "", bare
                continue
            mark, to = end, None
            if end and end != recipients.START:
                to = yield from recipients.recipient(text)
                mark = (
                    "" if to is not None else (yield from text.until(recipients.BEGIN, self.emit))
                )
            if mark:
                to = yield from recipients.recipient(text)
            elif to is None:
                return

    def _speaker(self, to: str | None) -> EmitText:
        """Return the consumer of messages to a recipient; None: of other text."""
        to = self.silent if to == "" else to
        if to == "self":
            return self.emit_reasoning
        self.reasoning_ended = True
        if to in self.to_none:
            return _drop
        if to in self.to_user:
            return self.answer
        return self.emit if to is None else self.pass_on


class MuseGlimmerReasoning(MuseReasoning):
    """` to=self<|message|>…<|eom|>`, then messages to the user, or to no one, and to tools, which
    are for the tool parser `muse_glimmer`.
    """

    to_user = frozenset({"user"})
    to_none = frozenset()
    silent = "user"


_MODEL, _END, _OVER = "<|message_model|>", "<|end_message|>", "<|content_model_end_sampling|>"
_THINKING, _TEXT, _CALL = (
    "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"
)  # fmt: skip
_TYPES = (_THINKING, _TEXT, _CALL, "<|content_invoke_tool_text|>", "<|content_tool_error|>")
_MAX_HEADER = 256


class InklingReasoning(MessagesReasoning):
    """Blocks `<|message_model|>HEADER<|content_thinking|>…<|end_message|>`, or `<|content_text|>`;
    those of calls are for the tool parser `inkling`. The prompt has the first mark.
    """

    markers = (_MODEL, _END, _OVER, *_TYPES)
    thinking_switch = ("reasoning_effort", True)
    _type = ""
    """Type of the block that the prompt begins; "" before its header."""

    def see_prompt_end(self, text: str) -> None:
        """Note whether the prompt ends in a block of reasoning or content."""
        self._type = next((mark for mark in (_THINKING, _TEXT) if text.endswith(mark)), "")

    def read(self) -> Read[None]:
        """Read blocks; other text is content."""
        text, kind = self.text, self._type
        types, ends = Marks(*_TYPES, _MODEL, _END, _OVER), Marks(_END, _OVER, _MODEL)
        between = Marks(_MODEL, _OVER)
        while True:
            framed = bool(kind)
            if not kind:
                header = yield from text.until_within(types, _MAX_HEADER)
                framed = header is not None
                kind = header[1] if header is not None else _TEXT
            emit: EmitText = self.answer if framed else self.emit
            if kind == _THINKING:
                emit = self.emit_reasoning
            self.reasoning_ended = self.reasoning_ended or kind != _THINKING
            end = kind
            if kind in _TYPES:
                if kind == _CALL:
                    emit = self.pass_on
                    emit(kind)
                end = yield from text.until(ends, emit)
                if kind == _CALL and end:
                    emit(_END)
            while end in (_END, _OVER):
                end = yield from text.until(between, self.emit)
            if not end:
                return
            kind = ""


class BeamReasoning(HarmonyReasoning):
    """`<|channel|>analysis<|message|>…<|end|>`; messages in the channel `final` are content, and
    those to a tool are for the tool parser `beam`.
    """

    markers = HARMONY_MARKERS


def _drop(text: str) -> None:
    """Drop the text."""

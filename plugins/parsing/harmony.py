"""The message format of gpt-oss (harmony): headers that name a channel and, for calls, a recipient.

<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer
<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re

import msgspec

from .cursor import Cursor, EmitText, Marks, Read

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>",
           "<|call|>")  # fmt: skip
BEGIN = Marks("<|start|>", "<|channel|>")
"""Texts that begin a header. The prompt ends with the first `<|start|>`."""
END = Marks("<|end|>", "<|return|>", "<|call|>", "<|start|>")
"""Texts that end a message; `<|start|>` also begins the next one."""
ENDS = Marks(*END.texts, *BEGIN.texts)
"""Texts that end a call, even with incomplete JSON."""
_MESSAGE = Marks("<|message|>")
_MAX_HEADER = 256
_CHANNEL_MARK = Marks("<|channel|>")
_TO = Marks(" to=", "to=")
_FIRST = re.compile(r"\s*to=[^\s<]+\s*")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Header(msgspec.Struct):
    source: str
    channel: str
    recipient: str
    """Recipient of a call, as `functions.f`; "" for the user."""


class Messages:
    """Joins messages of one kind, with newlines between them."""

    def __init__(self, emit: EmitText) -> None:
        self._emit = emit
        self._has_content = self._between = False

    def begin(self) -> None:
        self._between = self._has_content

    def emit(self, text: str) -> None:
        if text:
            self._emit("\n" + text if self._between else text)
            self._has_content, self._between = True, False


def first_recipient(text: Cursor) -> Read[str]:
    """Consume and return ` to=f` before the output's `<|channel|>`; "" without it."""
    mark = yield from text.accept(_TO)
    if not mark:
        return ""
    text.back(mark)
    match = yield from text.until_within(_CHANNEL_MARK, _MAX_HEADER)
    if match is None:
        return ""
    named = _FIRST.fullmatch(match[0])
    text.back("".join(match) if named is None else match[1])
    return "" if named is None else match[0]


def header(text: Cursor, mark: str) -> Read[Header | None]:
    """Consume and return the header that begins with `mark`, up to `<|message|>`; consume nothing
    and return None if there is none.
    """
    match = yield from text.until_within(_MESSAGE, _MAX_HEADER)
    if match is None:
        return None
    source = mark + match[0]
    channel, recipient = _CHANNEL.search(source), _RECIPIENT.search(source)
    return Header(
        source + match[1],
        channel[1] if channel else "",
        recipient[1] if recipient else "",
    )

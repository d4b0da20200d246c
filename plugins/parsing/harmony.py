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
"""Texts that begin a header. The first header of an output lacks its `<|start|>`, which is in the
prompt."""
END = Marks("<|end|>", "<|return|>", "<|call|>", "<|start|>")
"""Texts that end a message; `<|start|>` begins the next one too."""
ENDS = Marks(*END.texts, *BEGIN.texts)
"""Texts that end a call, even if its JSON is incomplete."""
_MESSAGE = Marks("<|message|>")
_MAX_HEADER = 256
_CHANNEL_MARK = Marks("<|channel|>")
_TO = Marks(" to=", "to=")
_FIRST = re.compile(r"\s*to=[^\s<]+\s*")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Header(msgspec.Struct):
    """The header of a message."""

    source: str
    channel: str
    recipient: str
    """Recipient of the call, as `functions.f`; "" for messages to the user."""


class Messages:
    """Joins the messages of one kind into one text, with a newline between two."""

    def __init__(self, emit: EmitText) -> None:
        self._emit = emit
        self._said = self._between = False

    def begin(self) -> None:
        """Start another message."""
        self._between = self._said

    def emit(self, text: str) -> None:
        """Pass on text of a message."""
        if text:
            self._emit("\n" + text if self._between else text)
            self._said, self._between = True, False


def first_recipient(text: Cursor) -> Read[str]:
    """Consume and return ` to=f` at the beginning of an output, in front of `<|channel|>`; "" if it
    begins otherwise."""
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
    """Return the header that begins with `mark`, up to its `<|message|>`; None, with nothing
    consumed, if there is none."""
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

"""The message format of gpt-oss (harmony): headers that name a channel and, for calls, a recipient.

<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer
<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re

import msgspec

from .cursor import Cursor, Marks, Read, Say

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>",
           "<|call|>")  # fmt: skip
BEGIN = Marks("<|start|>", "<|channel|>")
"""What begins a header. The first of an answer is missing its `<|start|>`: the prompt has it."""
END = Marks("<|end|>", "<|return|>", "<|call|>", "<|start|>")
"""What ends a message; `<|start|>` begins the next one too."""
ENDS = Marks(*END.texts, *BEGIN.texts)
"""What ends a call, even where its JSON is not over."""
_MESSAGE = Marks("<|message|>")
_MAX_HEADER = 256
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Header(msgspec.Struct):
    """What stands before a message."""

    source: str
    channel: str
    recipient: str
    """Who is called, as `functions.f`; "" for messages to the user."""


class Messages:
    """The messages of one kind as one text: a newline between two."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._said = self._between = False

    def begin(self) -> None:
        """Another message begins."""
        self._between = self._said

    def say(self, text: str) -> None:
        """Pass text of a message on."""
        if text:
            self._say("\n" + text if self._between else text)
            self._said, self._between = True, False


def header(text: Cursor, mark: str) -> Read[Header | None]:
    """The header that `mark` began, up to its `<|message|>`; None, and nothing consumed, if it is
    none.
    """
    found = yield from text.until_within(_MESSAGE, _MAX_HEADER)
    if found is None:
        return None
    source = mark + found[0]
    channel, recipient = _CHANNEL.search(source), _RECIPIENT.search(source)
    return Header(
        source + found[1],
        channel[1] if channel else "",
        recipient[1] if recipient else "",
    )

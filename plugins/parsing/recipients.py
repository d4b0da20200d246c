"""The message format of Muse: headers that name a recipient.

to=self<|message|>thought<|eom|><|start|>assistant to=user<|message|>answer<|eot|>
to=f<|message|><atem:function_calls>…</atem:function_calls><|eom|>
"""

from __future__ import annotations

import re

from .cursor import Cursor, Marks, Read

START, MESSAGE = "<|start|>", "<|message|>"
BEGIN = Marks(START)
MARKERS = (START, MESSAGE, "<|eom|>", "<|eot|>")
END = Marks("<|eom|>", "<|eot|>", START)
"""Texts that end a message; `<|start|>` also begins the next one."""
BARE = Marks(" to=")
"""Begins a header in an unfinished message."""
_MESSAGE = Marks(MESSAGE)
_NAME = re.compile(r"[\w.\-]+")
_MAX_HEADER = 256
_HEADER = re.compile(r"\s*(?:assistant)?(?:\s+to=([\w.\-]+))?\s*")


def bare_recipient(text: Cursor) -> Read[tuple[str | None, str]]:
    """Consume the rest of a header without `<|start|>`, after ` to=`. Return its recipient (None if
    it is not a header) and the consumed text.
    """
    name = yield from text.run(_NAME)
    mark = yield from text.accept(_MESSAGE)
    return (name if name and mark else None), name + mark


def recipient(text: Cursor) -> Read[str | None]:
    """Consume a header after its `<|start|>`, and return its recipient, "" without one; consume
    nothing and return None without a header.
    """
    match = yield from text.until_within(_MESSAGE, _MAX_HEADER)
    if match is None:
        return None
    header = _HEADER.fullmatch(match[0])
    if header is None:
        text.back("".join(match))
        return None
    return header[1] or ""

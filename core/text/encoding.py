"""One call of the `tokenizers` library that lets other threads run while a long text is encoded.

`Backend.encode` keeps the interpreter's lock from its first character to its last, on whichever
thread it runs: behind a megabyte of text the event loop would stand still for most of a second.
Batches give the lock up, but their threads are few and shared, so that a short text
could wait there for other people's long ones.
"""

from __future__ import annotations

from typing import Any

LONG_TEXT = 8192
"""Characters from which on a text is worth a thread: below, it takes some two milliseconds."""


def encode(
    backend: Any, text: str, pair: str | None = None, *, add_special_tokens: bool = True
) -> Any:
    """The `tokenizers.Encoding` of one text or of two; offsets are not to be read."""
    if len(text) + len(pair or "") < LONG_TEXT:
        return backend.encode(text, pair, add_special_tokens=add_special_tokens)
    if pair is None:
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    # The fast one forgets which of the two a token belongs to.
    return backend.encode_batch([(text, pair)], add_special_tokens=add_special_tokens)[0]

"""Encodes texts without holding the GIL, in time and memory bounded by the permitted tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from ..errors import ContextLengthExceeded, InvalidRequest

LONG_TEXT = 8192
"""Characters from which a text is encoded on a thread; shorter ones take up to 2 ms."""
PIECE = 1 << 16
"""Characters per piece while estimating whether a text is too long."""
_SLACK = 64
"""Tokens that a cut may add on both sides."""


def encode_text(
    backend: Any, text: str, pair: str | None = None, *, add_special_tokens: bool
) -> Any:
    """Encode one or two texts as one `tokenizers.Encoding`, without valid offsets.

    `Backend.encode` holds the GIL on any thread, for most of a second per megabyte. Batches release
    it, but share a few threads, where short texts would wait for long ones.
    """
    if len(text) + len(pair or "") < LONG_TEXT:
        return backend.encode(text, pair, add_special_tokens=add_special_tokens)
    if pair is None:
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    # encode_batch_fast loses the type ids of pairs.
    return backend.encode_batch([(text, pair)], add_special_tokens=add_special_tokens)[0]


class TokenLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The most tokens of a text, and how longer ones are treated."""

    tokens: int
    context: int
    """Context length, for the error."""
    cut: Literal["left", "right"] | None = None
    """Side of truncation; None: refuse."""
    param: str = "prompt"

    def exceeded(self, tokens: int) -> InvalidRequest:
        """Return the error for a text of at least this many tokens."""
        if self.tokens <= self.context:
            return ContextLengthExceeded.of(
                self.context,
                tokens,
                f"your {self.param} has more than {self.tokens} tokens. Shorten it or set "
                "truncate_prompt_tokens.",
                param=self.param,
            )
        return InvalidRequest(
            f"{self.param}: has more than {self.tokens} tokens, which is the most that is "
            f"tokenized here (the model's context holds {self.context}); send it in parts",
            param=self.param,
        )

    def check_characters(self, size: int, characters_per_token: Callable[[], int]) -> None:
        """Raise `exceeded` if this many characters cannot fit."""
        if self.cut is None and size > max(PIECE, 2 * self.tokens):
            if size > self.tokens * characters_per_token():
                raise self.exceeded(self.tokens + 1)


def encode_within(
    text: str,
    limit: TokenLimit | None,
    encode: Callable[[str], list[int]],
    characters_per_token: Callable[[], int],
) -> list[int]:
    """Return `text`'s token ids. Raises `TokenLimit.exceeded` if it is far too long.

    Estimates from pieces whether to encode at all. The result may still exceed the limit: the
    caller checks and truncates.
    """
    if limit is None:
        return encode(text)
    if limit.cut is not None:
        return _encode_cut(text, limit.tokens, limit.cut, encode)
    if len(text) > max(PIECE, 2 * limit.tokens):
        _check_pieces(text, limit, encode, characters_per_token)
    token_ids = encode(text)
    if len(token_ids) > limit.tokens > limit.context:
        raise limit.exceeded(len(token_ids))
    return token_ids


def _check_pieces(
    text: str,
    limit: TokenLimit,
    encode: Callable[[str], list[int]],
    characters_per_token: Callable[[], int],
) -> None:
    limit.check_characters(len(text), characters_per_token)
    count = 0
    for number, begin in enumerate(range(0, len(text), PIECE), 1):
        count += len(encode(text[begin : begin + PIECE]))
        if count > limit.tokens + number * _SLACK:
            raise limit.exceeded(count)


def _encode_cut(
    text: str, tokens: int, side: Literal["left", "right"], encode: Callable[[str], list[int]]
) -> list[int]:
    """Return at least `tokens` tokens of one end, unaffected by the cut."""
    size = max(PIECE, 4 * tokens)
    while True:
        token_ids = encode(text[:size] if side == "right" else text[-size:])
        if len(token_ids) >= tokens + _SLACK or size >= len(text):
            return token_ids
        size *= 4

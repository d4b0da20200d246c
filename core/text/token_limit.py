"""Encodes texts that may be far too long in time and memory bounded by what they may become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from ..errors import ContextLengthExceeded, InvalidRequest

PIECE = 1 << 16
"""Characters that are encoded at once before it is known whether a text is too long."""
_SLACK = 64
"""Tokens that a cut through a text may add on its two sides."""


class TokenLimit(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens a text may become, and what happens to a longer one."""

    tokens: int
    context: int
    """Of the model, for the refusal."""
    cut: Literal["left", "right"] | None = None
    """Side on which a longer text loses tokens; None: it is refused."""
    param: str = "prompt"

    def exceeded(self, tokens: int) -> InvalidRequest:
        """The refusal of a text that has at least so many tokens."""
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
        """Raises as `exceeded` where no text of so many characters could fit."""
        if self.cut is None and size > max(PIECE, 2 * self.tokens):
            if size > self.tokens * characters_per_token():
                raise self.exceeded(self.tokens + 1)


def encode_within(
    text: str,
    limit: TokenLimit | None,
    encode: Callable[[str], list[int]],
    characters_per_token: Callable[[], int],
) -> list[int]:
    """Token ids of `text`. Raises what `TokenLimit.exceeded` makes of one that is too long.

    A text that is to be cut may come back with more tokens than the limit, and so may a prompt:
    the caller cuts, and tells a prompt's length to the token. Here it is found out, from pieces of
    it and about, that a text is too long to be encoded at all.
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
    """Tokens of as much of one end as is needed for so many tokens, untouched by the cut."""
    size = max(PIECE, 4 * tokens)
    while True:
        token_ids = encode(text[:size] if side == "right" else text[-size:])
        if len(token_ids) >= tokens + _SLACK or size >= len(text):
            return token_ids
        size *= 4

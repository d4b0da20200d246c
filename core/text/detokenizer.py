"""Token ids to text, a few at a time: never half a character, and in all exactly `decode`.

A window of recent tokens is decoded twice, with and without the new ones; the difference is the
new text. It is held back while it ends in an unfinished character. The window is bounded, so the
work is linear in the output. (One exception to "exactly": the decoder of a byte-fallback
vocabulary spoils a whole run of bytes that are no UTF-8, and what was valid in it may be out.)
"""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
WINDOW = 6
"""Tokens of context before the new ones: enough for joins at the border."""
MAX_HELD = 16
"""Tokens held back at most: more than one character never takes so many."""


class IncrementalDetokenizer:
    """Detokenizes one output."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tokens = self._kept(prompt_token_ids[-2 * WINDOW :])[-WINDOW:]
        self._read = len(self._tokens)
        """Tokens whose text was given out."""

    def push(self, token_ids: Sequence[int]) -> str:
        """→ the text that these tokens add, as far as it is certain."""
        self._tokens.extend(self._kept(token_ids))
        return self._advance(final=False)

    def finish(self) -> str:
        """→ what was held back."""
        return self._advance(final=True)

    def _kept(self, token_ids: Sequence[int]) -> list[int]:
        if not self._skip:
            return list(token_ids)
        special = self._tokenizer.special_ids
        return [token for token in token_ids if token not in special]

    def _advance(self, *, final: bool) -> str:
        held = len(self._tokens) - self._read
        if held == 0:
            return ""
        before = self._decode(self._tokens[: self._read])
        whole = self._decode(self._tokens)
        unfinished = whole.endswith(REPLACEMENT) and held < MAX_HELD
        if not final and (unfinished or len(whole) <= len(before)):
            return ""
        self._read = len(self._tokens)
        self._trim()
        return whole[len(before) :]

    def _trim(self) -> None:
        """Forget old tokens, but never so that the window starts inside a character."""
        if len(self._tokens) <= 4 * WINDOW:
            return
        for start in range(len(self._tokens) - WINDOW, len(self._tokens) - 3 * WINDOW, -1):
            window = self._tokens[start:]
            if not self._decode(window).startswith(REPLACEMENT):
                self._tokens = window
                self._read = len(window)
                return

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.backend.decode(token_ids, skip_special_tokens=False)
        return text

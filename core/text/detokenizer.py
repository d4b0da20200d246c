"""`IncrementalDetokenizer`: the text of a growing token sequence, in complete characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import partial

from .tokenizer import Tokenizer, strip_spaces

_CONTEXT = 4
"""Prompt tokens that influence the first output tokens' text."""


class IncrementalDetokenizer:
    """Turns pushed tokens into text deltas, in linear time.

    The deltas and `finish()` together equal decoding prompt and output minus decoding the prompt.
    Ids without a token (a padded vocabulary's) add nothing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        context: list[int] = []
        for id in reversed(prompt_token_ids):
            if id not in self._hidden and 0 <= id <= tokenizer.max_token_id:
                context.append(id)
                if len(context) == _CONTEXT:
                    break
        context.reverse()
        if tokenizer.pieces is not None:
            self._source: _Bytes | _Neighbours = _Bytes(tokenizer, context)
        else:
            split = tokenizer.joins_with_spaces and not spaces_between_special_tokens
            self._source = _Neighbours(tokenizer, context, split_at_added=split)

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push_token, token_ids))

    def push_token(self, token_id: int) -> str:
        return "" if token_id in self._hidden else self._source.push_token(token_id)

    def finish(self) -> str:
        """Return an incomplete character as U+FFFD."""
        return self._source.finish()


class _Bytes:
    """For vocabularies of independent byte strings: a streaming UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        assert tokenizer.pieces is not None
        self._token_bytes = tokenizer.token_bytes
        self._whole_text = tokenizer.whole_text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(tokenizer.token_bytes, prompt)))
        self._strip = 0 if prompt else tokenizer.pieces.strip_start
        self._pushed = False
        self._between = self._is_between()
        """Whether a token of whole characters is its own text, as no character is incomplete."""

    def push_token(self, id: int) -> str:
        if self._between:
            whole = self._whole_text(id)
            if whole:
                self._pushed = True
                return whole
        text = self._decode(id)
        self._between = self._is_between()
        return text

    def _is_between(self) -> bool:
        return not self._strip and not self._decoder.getstate()[0]

    def _decode(self, id: int) -> str:
        data = self._token_bytes(id)
        self._pushed = self._pushed or bool(data)
        text = self._decoder.decode(data)
        if self._strip and text:
            stripped = strip_spaces(text, self._strip)
            self._strip = 0 if stripped else self._strip - len(text)
            return stripped
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True) if self._pushed else ""


class _Neighbours:
    """For decoders that depend on neighbours: decodes new tokens after a few before them."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], *, split_at_added: bool) -> None:
        self._max_token_id = tokenizer.max_token_id
        self._decode = partial(tokenizer.backend.decode, skip_special_tokens=False)
        self._added = tokenizer.added_tokens if split_at_added else {}
        self._context: list[int] = []
        for id in prompt:
            self._context = [] if id in self._added else [*self._context, id]
        self._pending: list[int] = []

    def push_token(self, id: int) -> str:
        if not 0 <= id <= self._max_token_id:
            return ""
        if id in self._added:
            text = self.finish() + self._decode([id])
            self._context = []
            return text
        self._pending.append(id)
        ids = self._context + self._pending
        text = self._decode(ids)[len(self._decode(self._context)) :]
        if text.endswith("\ufffd") and len(self._pending) < _CONTEXT:
            return ""
        self._context, self._pending = ids[-_CONTEXT:], []
        return text

    def finish(self) -> str:
        if not self._pending:
            return ""
        ids = self._context + self._pending
        text = self._decode(ids)[len(self._decode(self._context)) :]
        self._context, self._pending = ids[-_CONTEXT:], []
        return text

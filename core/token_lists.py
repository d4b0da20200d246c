"""A request's own lists of tokens, and whether they leave none that may come next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from .sampling_params import SamplingParams

Words = tuple[tuple[int, ...], ...]
"""Token sequences whose last token may not follow the others."""


class TokenLists:
    """allowed_token_ids without bad_words, for masks of a grammar."""

    def __init__(self, params: SamplingParams, bad_words: Words) -> None:
        self.fields = [
            name
            for name, present in (
                ("allowed_token_ids", params.allowed_token_ids is not None),
                ("bad_words", bool(params.bad_words)),
            )
            if present
        ]
        """Those of the request; a checkpoint may have bad words as well."""
        self._allowed = params.allowed_token_ids
        self._barred = [word[0] for word in bad_words if len(word) == 1]
        self._words: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """Token → (beginning that ends in it, token that may not follow), of longer words."""
        for word in bad_words:
            if len(word) > 1:
                self._words.setdefault(word[-2], []).append((word[:-1], word[-1]))
        self._bits: np.ndarray | None = None

    def narrow(self, row: np.ndarray, output: Sequence[int]) -> None:
        """Clear the bits of tokens that may not follow this output.

        row: [words] int32; token i is bit i % 32 of word i // 32
        """
        if self._bits is None:
            self._bits = self._always(len(row))
        row &= self._bits
        for beginning, token in self._words.get(output[-1], ()) if output else ():
            if tuple(output[-len(beginning) :]) == beginning and token >> 5 < len(row):
                row.view(np.uint32)[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)

    def _always(self, num_words: int) -> np.ndarray:
        """Return the bits of tokens that may come somewhere: [num_words] int32."""
        size = num_words * 32
        on = np.full(size, self._allowed is None)
        on[_within(self._allowed or (), size)] = True
        on[_within(self._barred, size)] = False
        return np.packbits(on, bitorder="little").view(np.int32)


def token_lists(params: SamplingParams, bad_words: Words) -> TokenLists | None:
    """Return a request's lists; None: it has none."""
    if params.allowed_token_ids is None and not bad_words:
        return None
    return TokenLists(params, bad_words)


def barring_fields(
    params: SamplingParams,
    bad_words: Words,
    stop_token_ids: Collection[int],
    vocab_size: int | None = None,
) -> list[str]:
    """Return the fields that together bar every token; []: they leave some.

    vocab_size: as the output's first token, even without allowed_token_ids; None: anywhere in the
    output, in the worst case.
    """
    anywhere = vocab_size is None
    stops = stop_token_ids if params.min_tokens else ()
    words = {word[-1] for word in bad_words if len(word) == 1 or anywhere}
    if params.allowed_token_ids is None:
        if vocab_size is None or len(words) + len(stops) < vocab_size:
            return []
        choices = set(range(vocab_size))
    else:
        choices = set(params.allowed_token_ids)
    fields: list[str] = []
    for field, tokens in (("min_tokens", stops), ("bad_words", words)):
        if not choices.isdisjoint(tokens):
            fields.append(field)
            choices.difference_update(tokens)
    if choices:
        return []
    return fields if params.allowed_token_ids is None else ["allowed_token_ids", *fields]


def _within(token_ids: Any, size: int) -> np.ndarray:
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[(ids >= 0) & (ids < size)]

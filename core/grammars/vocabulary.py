"""A tokenizer's vocabulary for grammars: bytes by id, and the end tokens."""

from __future__ import annotations

from collections.abc import Iterable

from ..protocols.grammars import Vocabulary
from ..text.tokenizer import Tokenizer


def make_vocabulary(
    tokenizer: Tokenizer, size: int, eos_token_ids: Iterable[int], *, compact_json: bool
) -> Vocabulary:
    """Return the vocabulary. size: the model's vocab_size; unknown ids are empty."""

    def bytes_of(token_id: int) -> bytes:
        return b"" if token_id in tokenizer.special_ids else tokenizer.token_bytes(token_id)

    return Vocabulary(
        token_bytes=[bytes_of(token_id) for token_id in range(size)],
        size=size,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        compact_json=compact_json,
        special_tokens={
            tokenizer.added_tokens[token_id].content: token_id
            for token_id in sorted(tokenizer.special_ids)
            if token_id < size
        },
    )

"""Tokenizers of the `tokenizers` library that are equal to tiktoken's: a vocabulary of bytes in the
order of merges, and the pattern that first splits a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ...core.text.token_bytes import ALPHABET

BYTES = {byte: char for char, byte in ALPHABET.items()}


def spelled(ranks: Mapping[bytes, int]) -> dict[str, int]:
    """Return a vocabulary as the library spells it: a character for each byte."""
    return {"".join(BYTES[byte] for byte in token): rank for token, rank in ranks.items()}


def merges(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs that become a token, by rank.

    tiktoken joins the neighbours that make the token of the lowest rank.
    """
    pairs: list[tuple[str, str]] = []
    for token in ranks:
        of_token = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in ranks and token[cut:] in ranks
        ]
        of_token.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        pairs += of_token
    return pairs


def byte_pairs(
    vocabulary: Mapping[str, int], pairs: Sequence[tuple[str, str]], pattern: Regex
) -> Backend:
    """Return a tokenizer without special tokens."""
    tokenizer = Backend(models.BPE(dict(vocabulary), list(pairs), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer

"""What the halves of the part `attention_similarity` agree on."""

from __future__ import annotations

import msgspec

NAME = "attention_similarity"
REFERENCE, COMPARED = "reference", "compared"
"""What a request is."""


class Similarities(msgspec.Struct, frozen=True):
    """With the result of a step of a compared request."""

    sums: tuple[float, ...]
    """[num_layers] Cosines, summed over tokens."""
    num_tokens: int

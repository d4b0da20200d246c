"""Where a grammar begins for a model that thinks first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..text.tokenizer import Tokenizer


def thought_markers(parser: Any) -> tuple[bytes, bytes] | None:
    """What opens and closes the thought, by the reasoning parser's class; None: it does not say."""
    markers = getattr(parser, "markers", None)
    return None if markers is None else (markers[0].encode(), markers[1].encode())


def thought_is_open(
    prompt: Sequence[int], markers: tuple[bytes, bytes], tokenizer: Tokenizer, default: bool
) -> bool:
    """Whether the model's first token belongs to a thought.

    The prompt's last turn tells: a marker that the template wrote behind the last special token.
    Without one it is `default`: what the reasoning parser takes a text to begin as.
    """
    turn: list[bytes] = []
    written = [marker.decode() for marker in markers]
    for token_id in reversed(prompt):
        special = token_id in tokenizer.special_ids
        if special and tokenizer.backend.id_to_token(token_id) not in written:
            break
        turn.append(tokenizer.token_bytes(token_id))
        text = b"".join(reversed(turn[-len(markers[1]) :]))
        if markers[1] in text:
            return False
        if markers[0] in text:
            return True
    return default

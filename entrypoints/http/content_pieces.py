"""Pieces of a message's content, texts and pictures, on their way to a chat's parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from ...core.media.sources import MediaPart

Piece: TypeAlias = str | MediaPart
Turn: TypeAlias = str | list[Piece]


def as_turn(pieces: Sequence[Piece]) -> Turn:
    """Return pieces as a list, or the text of a single one."""
    if len(pieces) == 1 and isinstance(pieces[0], str):
        return pieces[0]
    return list(pieces) or ""


def as_content(turns: Sequence[Turn], between: str) -> str | list[dict[str, Any]]:
    """Return one turn's pieces as parts, and several turns' as one text; as parts if there are
    pictures."""
    lists = [turn if isinstance(turn, list) else [turn] for turn in turns]
    alone = len(turns) == 1 and isinstance(turns[0], list)
    if alone or any(isinstance(piece, MediaPart) for pieces in lists for piece in pieces):
        return [_part(piece) for pieces in lists for piece in pieces]
    return between.join("\n".join(map(str, pieces)) for pieces in lists)


def _part(piece: Piece) -> dict[str, Any]:
    return piece if isinstance(piece, MediaPart) else {"type": "text", "text": piece}

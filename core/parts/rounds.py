"""Rounds: steps that engines compute together, as each has some of a mixture's experts."""

from __future__ import annotations

import msgspec

NAME = "rounds"


class RoundResult(msgspec.Struct, frozen=True):
    """What became of a round."""

    num_tokens: int
    """Of the engine that had most; 0: none had any."""

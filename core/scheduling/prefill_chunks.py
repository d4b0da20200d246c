"""Decides a step's tokens of a prompt."""

from __future__ import annotations

from ..request import Request


class PrefillChunks:
    """Chunk lengths before parts shorten them."""

    def __init__(self, *, chunked: bool, longest: int) -> None:
        """chunked: whether steps may split prompts. longest: chunk limit; 0: the budget."""
        self.chunked = chunked
        self._longest = longest if chunked else 0

    def most(self, budget: int) -> int:
        return min(self._longest or budget, budget)

    def length(self, request: Request, computed: int, budget: int) -> int:
        return min(request.num_tokens - computed, self.most(budget))

"""Decides how many tokens of a prompt a step computes."""

from __future__ import annotations

from ..request import Request


class PrefillChunks:
    """Lengths of the chunks in which prompts are computed, before parts shorten them."""

    def __init__(self, *, chunked: bool, longest: int) -> None:
        """chunked: whether a prompt may take several steps. longest: tokens of a chunk, if chunked;
        0: as many as the step's budget allows."""
        self.chunked = chunked
        self._longest = longest if chunked else 0

    def most(self, budget: int) -> int:
        """Return the most tokens of a request that a step with this budget computes."""
        return min(self._longest or budget, budget)

    def length(self, request: Request, computed: int, budget: int) -> int:
        """Return the length of the chunk that follows the first `computed` tokens."""
        return min(request.num_tokens - computed, self.most(budget))

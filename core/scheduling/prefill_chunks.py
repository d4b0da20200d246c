"""Decides how many tokens of a prompt a step computes."""

from __future__ import annotations

from ..request import Request


class PrefillChunks:
    """Lengths of the chunks in which prompts are computed.

    If layers keep states, a chunk ends where the states after it are worth keeping: after the
    blocks that a request with the same tokens would not compute, and after what the request has in
    common with earlier ones (`Request.state_boundary`). It ends where the cache is compacted, too.
    """

    def __init__(
        self, *, chunked: bool, longest: int, block_size: int, ends_at_states: bool
    ) -> None:
        """chunked: whether a prompt may take several steps. longest: tokens of a chunk, if chunked;
        0: as many as the step's budget allows. ends_at_states: layers keep states."""
        self.chunked = chunked
        self._longest = longest if chunked else 0
        self._block_size = block_size
        self._ends_at_states = ends_at_states

    def most(self, budget: int) -> int:
        """Return the most tokens of a request that a step with this budget computes."""
        return min(self._longest or budget, budget)

    def length(self, request: Request, computed: int, budget: int) -> int:
        """Return the length of the chunk that follows the first `computed` tokens."""
        chunk = min(request.num_tokens - computed, self.most(budget))
        if computed < request.compact_at < computed + chunk:
            return request.compact_at - computed
        if self._ends_at_states and self.chunked:
            for boundary in sorted((self._last_boundary(request), request.state_boundary)):
                if computed < boundary < computed + chunk:
                    return boundary - computed
        return chunk

    def ends_at_boundary(self, request: Request) -> bool:
        """Return whether the states after the request's computed tokens are worth keeping."""
        computed = request.num_computed_tokens
        return computed > 0 and computed in (self._last_boundary(request), request.state_boundary)

    def _last_boundary(self, request: Request) -> int:
        """Return the tokens of the blocks that a request with the same tokens would not compute."""
        return (request.num_known_tokens - 1) // self._block_size * self._block_size

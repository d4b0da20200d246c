"""A schedule policy: short prompts first."""

from __future__ import annotations

from typing import Any


class ShortestPrompt:
    """Requests with fewer prompt tokens go first; among equals by arrival.

    A long prompt waits as long as shorter ones keep coming: good for a batch of known requests,
    not for a public server.
    """

    def key(self, request: Any) -> tuple[Any, ...]:
        """Smallest first; `request` is a jackfield.core.request.Request."""
        return (request.num_prompt_tokens, request.arrival)

"""Pauses and limits of a member's restarts."""

from __future__ import annotations

FIRST_PAUSE = 0.5
"""Seconds before the first restart; doubles each time."""
LONGEST_PAUSE = 30.0
MAX_RESTARTS = 8
"""Most consecutive restarts."""
STEADY_SECONDS = 300.0
"""Serving time after which restarts count from 0."""


class RestartPolicy:
    """Counts a member's ends, in seconds of any clock."""

    def __init__(self, most: int = MAX_RESTARTS) -> None:
        self.num_failures = 0
        self._most = most

    def pause(self, served_seconds: float) -> float | None:
        """Return the pause before the next start; None: give up.

        served_seconds: 0 if it did not start.
        """
        if served_seconds >= STEADY_SECONDS:
            self.num_failures = 0
        self.num_failures += 1
        if self.num_failures > self._most:
            return None
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self.num_failures - 1))

"""How often, and after which pauses, a member that has ended is started again."""

from __future__ import annotations

FIRST_PAUSE = 0.5
"""Seconds before the first new start; each further one waits twice as long."""
LONGEST_PAUSE = 30.0
MAX_RESTARTS = 8
"""New starts of a member that ends again and again."""
STEADY_SECONDS = 300.0
"""A member that has served for so long counts as sound: its restarts are counted from 0."""


class RestartPolicy:
    """Counts the ends of one member. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self.num_failures = 0
        """Ends since the member last served for STEADY_SECONDS."""

    def pause(self, served_seconds: float) -> float | None:
        """Return how long to wait before the next start; None: give the member up.

        served_seconds: how long it has served; 0: it has not started.
        """
        if served_seconds >= STEADY_SECONDS:
            self.num_failures = 0
        self.num_failures += 1
        if self.num_failures > MAX_RESTARTS:
            return None
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self.num_failures - 1))

"""What an engine that sleeps lacks."""

from __future__ import annotations

from ..errors import Conflict
from ..live.engine_jobs import ReadFiles


class SleepState:
    def __init__(self, source: ReadFiles) -> None:
        """source: what reads the weights that an engine starts with."""
        self.asleep: set[str] = set()
        """Tags whose memory was given back."""
        self.began = False
        """Whether a sleep has begun and not ended."""
        self.stays_paused = False
        """Whether the engine was paused before, and is so afterwards."""
        self.lacks_weights = False
        """Whether the memory of the weights is there, and not their numbers."""
        self.source: ReadFiles | None = source
        """What reads the weights that serve; None: they were sent."""
        self._drops_weights = False

    def begin(self, tags: tuple[str, ...], *, stays_paused: bool, keeps: bool) -> None:
        """Begin to sleep. keeps: the weights' numbers are kept."""
        self.asleep = set(tags)
        self.began, self.stays_paused = True, stays_paused
        self._drops_weights = "weights" in tags and not keeps

    def take_weights(self, source: ReadFiles | None) -> None:
        """Note that an update was committed."""
        self.source = source
        self.lacks_weights = self._drops_weights = False

    def check_awake(self, done: str) -> None:
        """Raise Conflict while asleep. done: what is not done then."""
        if self.began:
            raise Conflict(f"the engine sleeps, and cannot be {done}: wake it first")

    def check_source(self) -> None:
        """Raise Conflict if all is about to wake, and weights that were sent are lost."""
        if self._drops_weights and self.source is None:
            raise Conflict(
                "the weights were dropped, and had been sent, so they cannot be read again: wake "
                "tags=weights, send an update, then wake the rest"
            )

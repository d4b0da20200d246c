"""Tells the engines that divide the experts with this one when steps begin, and hears of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from ..parallel.meeting import Engine

KEPT = 8
"""Waves whose keys are kept. A slow engine is at most one wave behind, as each wave needs
all engines."""


class OtherEngines:
    """For the event loop only; a thread of its own waits for the others."""

    def __init__(self, asked: Callable[[int], None]) -> None:
        """asked: called with the number of each wave (`core.scheduling.parts.rounds`)."""
        self._own = Engine.of_environment()
        self._announced = 0
        self._loop, self._asked = asyncio.get_running_loop(), asked
        # It waits in a library as long as the process runs.
        threading.Thread(target=self._listen, name="jackfield-waves", daemon=True).start()

    def announce(self, wave: int) -> None:
        """Tell the others of a wave that has begun here."""
        self._announced = wave
        self._own.tell(f"wave {wave}")
        if wave > KEPT:
            self._own.forget(f"wave {wave - KEPT}")

    def _listen(self) -> None:
        others = Engine.of_environment()
        heard = 0
        with contextlib.suppress(RuntimeError):  # The loop, or the first process, has ended.
            while True:
                wave = max(heard, self._announced) + 1
                if others.hears(f"wave {wave}"):
                    self._loop.call_soon_threadsafe(self._asked, wave)
                    heard = wave

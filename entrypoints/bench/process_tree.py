"""The processes that this one started, and those that they started: found and ended together.

Linux alone: they are read from /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

GRACE_SECONDS = 5.0
"""To exit after SIGTERM."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER."""


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(roots: Iterable[int]) -> set[int]:
    """Return those of these processes, and of all that they started, that have not ended."""
    running: set[int] = set()
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has just ended.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
            if state != "Z":
                running.add(int(stat.parent.name))
    found, pending = set[int](), list(roots)
    while pending:
        found.add(pid := pending.pop())
        pending += children.get(pid, [])
    return found & running


def end_descendants(keep: Iterable[int] = ()) -> None:
    """End what this process started and their orphans, but not `keep` and what those started:
    SIGTERM, and SIGKILL after GRACE_SECONDS."""
    own, keep = os.getpid(), list(keep)
    for number in (signal.SIGTERM, signal.SIGKILL):
        limit, notified = time.monotonic() + GRACE_SECONDS, set[int]()
        while left := descendants([own]) - descendants(keep) - {own}:
            for pid in left - notified:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            notified |= left
            if time.monotonic() > limit:
                break
            time.sleep(0.05)

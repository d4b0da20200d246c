"""Finds and ends this process's descendants (Linux: from /proc)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

GRACE_SECONDS = 5.0
"""Seconds to exit after SIGTERM."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER."""


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants. Also inherited through exec (`preexec_fn`)."""
    if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(roots: Iterable[int]) -> set[int]:
    """Return the running processes among these and their descendants."""
    running: set[int] = set()
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has just ended.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
            if state != "Z" or _has_threads(stat.parent):
                running.add(int(stat.parent.name))
    numbers, pending = set[int](), list(roots)
    while pending:
        numbers.add(pid := pending.pop())
        pending += children.get(pid, [])
    return numbers & running


def _has_threads(process: Path) -> bool:
    """Whether a process whose first thread has ended has others, which hold files and device
    memory.
    """
    states = []
    for stat in process.glob("task/[0-9]*/stat"):
        with contextlib.suppress(OSError):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return any(state not in "ZX" for state in states)


def end_descendants(keep: Iterable[int] = ()) -> set[int]:
    """End this process's descendants except `keep` and theirs: SIGTERM, then SIGKILL after
    GRACE_SECONDS. Return those that remain after as long again, perhaps in a driver's call.
    """
    own, keep = os.getpid(), list(keep)

    def others() -> set[int]:
        return descendants([own]) - descendants(keep) - {own}

    for number in (signal.SIGTERM, signal.SIGKILL):
        limit, notified = time.monotonic() + GRACE_SECONDS, set[int]()
        # The second look finds what was started, and orphaned, in the middle of the first.
        while left := others() or others():
            for pid in left - notified:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            notified |= left
            if time.monotonic() > limit:
                break
            time.sleep(0.05)
        else:
            return set()
    return others()

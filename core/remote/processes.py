"""Processes that belong to an engine: how they start, and that they end with the one that started
them.

Imports nothing large: such processes start before a program has imported the engine.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of Linux."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Of terminals and supervisors, which are the parent's to handle. A terminal sends them to all."""


def spawn(module: str, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start `python -m module DESCRIPTOR... PARENT` with what this process imports from, and with
    its environment. What it prints goes to standard error.

    It calls `follow_parent`; until then its SIGNALS are blocked. Not by multiprocessing, which
    would import the user's script again."""
    paths = [os.path.abspath(path) for path in sys.path]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, descriptors), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=descriptors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def follow_parent(parent: int) -> bool:
    """Leave SIGNALS to the parent, end with it (on Linux), and write the stacks of all threads on
    SIGUSR1. Return False if the parent has ended already."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PARENT_DEATH, signal.SIGKILL)
    if os.getppid() != parent:
        return False
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    return True


def describe_end(status: int | None) -> str:
    """Return how a process ended, as the rest of a sentence about it. status: None: it has not."""
    if status is None:
        return "closed its connection"
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    memory = "; the system does that when it is out of memory" if name == "SIGKILL" else ""
    return f"was ended by {name}{memory}"

"""An engine's processes: start, and end with their parent.

Imports nothing large, as they start before the engine is imported.
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
"""Linux's PR_SET_PDEATHSIG."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Handled by the parent; a terminal sends them to all."""


def spawn(module: str, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start `python -m module DESCRIPTOR... PARENT` with this process's import path and
    environment; prints go to standard error.

    SIGNALS are blocked until its `follow_parent`. multiprocessing would import the user's script
    again.
    """
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
    """Ignore SIGNALS, end with the parent (Linux), and write stacks on SIGUSR1. Return False if the
    parent has ended.
    """
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
    """Return the rest of a sentence on a process's end; status None: running."""
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

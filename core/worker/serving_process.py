"""What a process sets once its engine has started, and before it serves."""

from __future__ import annotations

import atexit
import gc
import sys

SWITCH_INTERVAL = 5e-6
"""Seconds after which a thread hands the interpreter lock to one that waits for it: a launch takes
the lock again after each call that released it."""


def prepare_to_serve() -> None:
    """Let threads hand over the interpreter lock soon, and `freeze`. Not before the start is done:
    compilers' threads would contend for the lock."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    freeze()


def freeze() -> None:
    """Exclude all current objects from garbage collection until the process exits: a collection of
    what a start has made would hold up every request.

    The last collection includes them again: native modules (Triton's) report objects that remain
    after it as leaks.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)

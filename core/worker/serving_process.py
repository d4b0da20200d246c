"""Process settings after an engine's start."""

from __future__ import annotations

import atexit
import gc
import sys

SWITCH_INTERVAL = 5e-6
"""Seconds until a thread yields the interpreter lock: a launch takes it again after each call that
released it."""


def prepare_to_serve() -> None:
    """Shorten the lock's switch interval, and `freeze`, after compilers' threads have ended."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    freeze()


def freeze() -> None:
    """Exclude current objects from garbage collection, which would delay requests.

    At exit they are included again, as native modules (Triton's) report leaks.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def collect_all() -> None:
    """Collect garbage, also among what `freeze` has excluded, and exclude the rest again."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()

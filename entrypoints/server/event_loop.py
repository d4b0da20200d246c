"""Runs a server's main coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run_on_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` on uvloop if installed, else on asyncio's loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)

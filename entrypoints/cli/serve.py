"""`jackfield serve [MODEL]`"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ...core.errors import JackfieldError
from .options import fail
from .serve_settings import settings


def run(argv: list[str]) -> int:
    """→ exit status"""
    try:
        found = settings(argv)
        if found.fronts > 1:
            from ..fronts.supervisor import serve_fronts

            return run_on_loop(serve_fronts(found))
        from ..openai.server import serve

        return run_on_loop(serve(found.config, found.plugins, found.listen, found.options))
    except (JackfieldError, OSError) as error:
        return fail(error)


def run_on_loop(main: Coroutine[Any, Any, int]) -> int:
    """On uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)

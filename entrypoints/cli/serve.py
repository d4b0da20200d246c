"""`jackfield serve [MODEL]`"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError, JackfieldError
from .options import fail
from .serve_settings import settings

if TYPE_CHECKING:
    from ..openai.server import Listen


def run(argv: list[str]) -> int:
    """→ exit status"""
    try:
        found = settings(argv)
        if found.fronts > 1:
            from ..fronts.supervisor import serve_fronts

            return run_on_loop(serve_fronts(found))
        _check_address(found.listen)
        from ..openai.server import serve

        return run_on_loop(serve(found.config, found.plugins, found.listen, found.options))
    except (JackfieldError, OSError) as error:
        return fail(error)


def _check_address(listen: Listen) -> None:
    """An address that is taken is told before a model is loaded. Raises ConfigError."""
    from ..fronts.sockets import check_free

    if listen.uds:
        if not Path(listen.uds).absolute().parent.is_dir():
            raise ConfigError(f"--uds: there is no folder for {listen.uds}", param="uds")
        return
    try:
        check_free(listen.host, listen.port)
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EAFNOSUPPORT:
            return  # One of the host's addresses is of a family that this machine does without.
        elsewhere = isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL
        named = elsewhere or isinstance(error, socket.gaierror | UnicodeError)
        flag = "host" if named else "port"
        raise ConfigError(
            f"--{flag}: cannot listen at {listen.host}:{listen.port}: {error}", param=flag
        ) from None


def run_on_loop(main: Coroutine[Any, Any, int]) -> int:
    """On uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)

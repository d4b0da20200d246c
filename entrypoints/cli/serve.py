"""`jackfield serve [MODEL]`"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import ConfigError, JackfieldError
from ...core.registration.executor_choice import choose_executor
from ..flags.engine_flags import fail
from ..server.event_loop import run_on_loop
from ..server.serve_settings import settings
from ..server.signals import StoppedAtStart, ending_at_signals

if TYPE_CHECKING:
    from ...core.config import EngineConfig
    from ...core.protocols.executors import Executor
    from ...core.registry import Plugins
    from ..server.listen import Listen


def run(argv: list[str]) -> int:
    if "--explain" in argv:
        from ..server.explain import explain

        return explain([word for word in argv if word != "--explain"])
    with ending_at_signals():
        return _serve(argv)


def _serve(argv: list[str]) -> int:
    try:
        options = settings(argv)
        if options.node_rank:
            return _run_host(options.config, options.plugins, options.node_rank)
        _check_address(options.listen)
        _start_ahead(options.config, options.plugins)
        if options.fronts > 1:
            from ..server.frontends.supervisor import serve_fronts

            return run_on_loop(serve_fronts(options))
        from ..server.server import serve

        return run_on_loop(serve(options.config, options.plugins, options.listen, options.options))
    except StoppedAtStart as stop:
        # A thread may still load, and native code that is unloaded under it aborts the process.
        sys.stderr.flush()
        os._exit(stop.status)
    except (JackfieldError, OSError) as error:
        return fail(error)


def _run_host(config: EngineConfig, plugins: Plugins, node_rank: int) -> int:
    """Run the ranks of a host other than the first."""
    executors = plugins["executor"]
    executor: type[Executor] = executors.load(choose_executor(config, executors))
    return executor.run_host(config, node_rank)


def _start_ahead(config: EngineConfig, plugins: Plugins) -> None:
    """Start other processes while this one imports the engine, which reports errors."""
    if config.data_parallel_size * config.num_ranks == 1:
        return
    with contextlib.suppress(JackfieldError):
        executors = plugins["executor"]
        executor = executors.load(choose_executor(config, executors))
        if config.data_parallel_size == 1:
            executor.start_ahead(config)
        elif executor.engine_hosts(config) is None:
            from ...core.data_parallel.spares import start_ahead

            start_ahead(config.data_parallel_size)


def _check_address(listen: Listen) -> None:
    from ..server.frontends.sockets import check_free, check_unix_free

    if listen.uds:
        if not Path(listen.uds).absolute().parent.is_dir():
            raise ConfigError(f"--uds: there is no folder for {listen.uds}", param="uds")
        try:
            check_unix_free(Path(listen.uds))
        except OSError as error:
            raise ConfigError(
                f"--uds: cannot listen at {listen.uds}: {error.strerror or error}", param="uds"
            ) from None
        return
    try:
        check_free(listen.host, listen.port)
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EAFNOSUPPORT:
            return  # One of the host's addresses has a family that this machine does not support.
        elsewhere = isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL
        has_host = elsewhere or isinstance(error, socket.gaierror | UnicodeError)
        flag = "host" if has_host else "port"
        raise ConfigError(
            f"--{flag}: cannot listen at {listen.host}:{listen.port}: {error}", param=flag
        ) from None

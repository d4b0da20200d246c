"""Runs a server in a child process while it is measured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp

SERVERS = ("jackfield", "vllm")
SERVED = "bench"
"""The model's name there."""
GRACE_SECONDS = 20.0
LOG_LINES = 15


def server_command(
    engine: str, model: str, *, dummy: bool, port: int, max_model_len: int, flags: Sequence[str]
) -> list[str]:
    """Return the command of an engine's server; `flags` take precedence."""
    common = ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", SERVED]
    common += ["--max-model-len", str(max_model_len)]
    if dummy:
        common += ["--load-format", "dummy"]
    model_args = [model] if model else []
    if engine == "jackfield":
        module = "jackfield.entrypoints.cli.main"
        common += ["--limit-waiting", "0"]  # A benchmark may send all of its requests at once.
        return [sys.executable, "-m", module, "serve", *model_args, *common, *flags]
    if dummy:
        common += ["--dtype", "bfloat16"]
    common += ["--gpu-memory-utilization", "0.9"]
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        *model_args,
        *common,
        *flags,
    ]


class Server:
    def __init__(self, url: str, start: float, log: Path, pid: int) -> None:
        self.url = url
        self.pid = pid
        self.began = start
        """Start of its process, by `time.perf_counter`."""
        self.log = log
        self.ready_seconds = 0.0

    def loop_seconds(self) -> float | None:
        """Return the processor time of its event loop's thread; None if unreadable."""
        try:
            fields = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_text().rpartition(")")[2]
            user, system = fields.split()[11:13]
        except (OSError, ValueError):
            return None
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def serving(
    command: Sequence[str], port: int, *, timeout: float = 600.0
) -> AsyncIterator[Server]:
    """Start a server, wait until it is healthy, and end it with its descendants.

    Raises RuntimeError with its log's end if it exits or is not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="jackfield-server-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            start = time.perf_counter()
            process = subprocess.Popen(  # noqa: ASYNC220
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        server = Server(f"http://127.0.0.1:{port}", start, log, process.pid)
        try:
            try:
                await asyncio.wait_for(_healthy(server, process), timeout)
            except TimeoutError:
                raise RuntimeError(f"not ready after {timeout:.0f} s:\n{_tail(log)}") from None
            server.ready_seconds = time.perf_counter() - start
            yield server
        finally:
            end_group(process)


async def _healthy(server: Server, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            if process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with status {process.returncode}:\n{_tail(server.log)}"
                )
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with session.get(f"{server.url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.02)


def end_group(process: subprocess.Popen[bytes], grace: float = GRACE_SECONDS) -> None:
    """End a session leader and its descendants.

    `grace`: seconds after SIGTERM.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])

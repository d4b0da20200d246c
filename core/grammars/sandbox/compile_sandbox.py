"""Compiles grammars in killable processes first: native code that hangs, exhausts memory or crashes
cannot be stopped in-process.

Frames are msgpack after four bytes of length; the process is `sandbox_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import struct
import sys
from typing import Any

import msgspec

from ...protocols.grammars import GrammarSpec, Vocabulary
from .probe import check_mask_time

logger = logging.getLogger("jackfield.structured")

START_SECONDS = 120.0
"""For a process to import its backend and read the vocabulary."""
EXIT_SECONDS = 2.0
"""For the exit status after the pipe closes."""
MAX_FRAME = 1 << 20
"""Most bytes of a result."""


class Setup(msgspec.Struct, frozen=True):
    backend: str
    import_path: list[str]
    """The engine process's, for the backend."""
    token_bytes: list[bytes]
    size: int
    eos_token_ids: tuple[int, ...]
    compact_json: bool
    special_tokens: dict[str, int]
    memory_bytes: int
    """Memory beyond that at readiness."""
    compile_seconds: float
    """Per grammar; enforced by the process, too."""


class Result(msgspec.Struct, frozen=True):
    error: str | None = None
    seconds: float = 0.0
    """Slowest mask of the first tokens."""
    exhausted: bool = False
    """Out of memory: the next grammar needs another process."""


class SandboxCrash(Exception):
    """A process ended while it compiled a grammar."""


class CompileSandbox:
    """Up to `processes` sandbox processes of a backend, started lazily."""

    def __init__(
        self,
        backend: type,
        vocabulary: Vocabulary,
        *,
        compile_timeout: float,
        mask_timeout: float,
        memory_bytes: int,
        processes: int = 1,
    ) -> None:
        self._setup = Setup(
            backend=f"{backend.__module__}:{backend.__qualname__}",
            import_path=sys.path,
            token_bytes=vocabulary.token_bytes,
            size=vocabulary.size,
            eos_token_ids=vocabulary.eos_token_ids,
            compact_json=vocabulary.compact_json,
            special_tokens=dict(vocabulary.special_tokens),
            memory_bytes=memory_bytes,
            compile_seconds=compile_timeout,
        )
        self._compile_timeout = compile_timeout
        self._mask_timeout = mask_timeout
        self._idle: list[asyncio.subprocess.Process] = []
        self._free = asyncio.Semaphore(processes)

    async def check(self, spec: GrammarSpec) -> None:
        try:
            await asyncio.wait_for(self._free.acquire(), self._compile_timeout)
        except TimeoutError:
            raise ValueError("other grammars are being tried; try again later") from None
        try:
            result = await self._result(spec)
        finally:
            self._free.release()
        if result.error is not None:
            raise ValueError(result.error)
        check_mask_time(result.seconds, self._mask_timeout)

    async def _result(self, spec: GrammarSpec) -> Result:
        """Return a grammar's result, retrying a crash in a fresh process, as earlier grammars may
        be the cause.
        """
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                with contextlib.suppress(SandboxCrash):
                    return await self._try(process, spec)
        try:
            return await self._try(await self._start(), spec)
        except SandboxCrash as error:
            logger.warning("a grammar ended its sandbox process: %s", error)
            raise ValueError(
                f"compiling it crashes the backend, or needs too much memory (compile_memory): "
                f"{error}"
            ) from None

    async def _try(self, process: asyncio.subprocess.Process, spec: GrammarSpec) -> Result:
        """Compile in this process, idle or ended afterwards. Raises SandboxCrash."""
        result = None
        try:
            result = await asyncio.wait_for(_exchange(process, spec), self._compile_timeout)
        except TimeoutError:
            raise ValueError(
                f"it takes longer to compile than {self._compile_timeout} s (compile_timeout)"
            ) from None
        except (EOFError, OSError, msgspec.DecodeError):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), EXIT_SECONDS)
            raise SandboxCrash(_ending(process.returncode)) from None
        finally:
            if result is None or result.exhausted:
                await _end(process)
            else:
                self._idle.append(process)
        return result

    async def _start(self) -> asyncio.subprocess.Process:
        """Return a new process. Raises ValueError on failure."""
        pipe = asyncio.subprocess.PIPE
        command = ("-m", f"{__package__}.sandbox_process")
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        error: str | None = None
        try:
            result = await asyncio.wait_for(_exchange(process, self._setup), START_SECONDS)
            error = result.error
        except (TimeoutError, EOFError, OSError, msgspec.DecodeError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        except BaseException:
            await _end(process)
            raise
        if error is None:
            return process
        await _end(process)
        logger.error("the grammar sandbox of %s does not start: %s", self._setup.backend, error)
        raise ValueError(f"the sandbox that would try this grammar does not start: {error}")

    async def close(self) -> None:
        while self._idle:
            await _end(self._idle.pop())


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


def _ending(returncode: int | None) -> str:
    """Return a process's ending: signal or exit status."""
    if returncode is not None and returncode < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-returncode).name
    return f"exit status {returncode}"


async def _exchange(process: asyncio.subprocess.Process, message: Any) -> Result:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(pack(message))
    await process.stdin.drain()
    (size,) = struct.unpack("<I", await process.stdout.readexactly(4))
    if size > MAX_FRAME:
        raise EOFError
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Result)


def pack(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body

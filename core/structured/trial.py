"""Tries costly grammars in a process of their own, which can be killed: nothing else ends native
code that takes too long, needs too much memory, or crashes.

Frames are msgpack behind four bytes of length; the child is `trial_child`.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from typing import Any

import msgspec

from ..protocols import GrammarSpec, Vocabulary
from .probe import check_mask_time

START_SECONDS = 120.0
"""For the child to import its backend and take the vocabulary."""


class Opening(msgspec.Struct, frozen=True):
    """The first frame to a child."""

    backend: str
    """module:qualified name of the class"""
    import_path: list[str]
    token_bytes: list[bytes]
    size: int
    eos_token_ids: tuple[int, ...]
    compact_json: bool
    special_tokens: dict[str, int]
    memory_bytes: int
    """What it may allocate beyond what it has when it is ready."""


class Verdict(msgspec.Struct, frozen=True):
    """The answer to the opening, and to each grammar."""

    error: str | None = None
    seconds: float = 0.0
    """The slowest mask of the first tokens."""


class Trial:
    """One child for one backend, started when it is first needed."""

    def __init__(
        self,
        backend: type,
        vocabulary: Vocabulary,
        *,
        compile_timeout: float,
        mask_timeout: float,
        memory_bytes: int,
    ) -> None:
        self._opening = Opening(
            backend=f"{backend.__module__}:{backend.__qualname__}",
            import_path=sys.path,
            token_bytes=vocabulary.token_bytes,
            size=vocabulary.size,
            eos_token_ids=vocabulary.eos_token_ids,
            compact_json=vocabulary.compact_json,
            special_tokens=dict(vocabulary.special_tokens),
            memory_bytes=memory_bytes,
        )
        self._compile_timeout = compile_timeout
        self._mask_timeout = mask_timeout
        self._child: asyncio.subprocess.Process | None = None
        self._free = asyncio.Lock()

    async def check(self, spec: GrammarSpec) -> None:
        """Raises ValueError when the grammar is wrong or costs too much."""
        try:
            await asyncio.wait_for(self._free.acquire(), self._compile_timeout)
        except TimeoutError:
            raise ValueError("other grammars are being tried; try again later") from None
        try:
            verdict = await self._verdict(spec)
        except BaseException:
            await self.close()
            raise
        finally:
            self._free.release()
        if verdict.error is not None:
            raise ValueError(verdict.error)
        check_mask_time(verdict.seconds, self._mask_timeout)

    async def _verdict(self, spec: GrammarSpec) -> Verdict:
        try:
            child = await asyncio.wait_for(self._started(), START_SECONDS)
            asked = _exchange(child, spec)
            return await asyncio.wait_for(asked, self._compile_timeout)
        except TimeoutError:
            raise ValueError(
                f"it takes longer to compile than {self._compile_timeout} s (compile_timeout)"
            ) from None
        except (EOFError, OSError):
            raise ValueError(
                "compiling it needs too much memory (compile_memory), or crashes the backend"
            ) from None

    async def _started(self) -> asyncio.subprocess.Process:
        if self._child is not None:
            return self._child
        pipe = asyncio.subprocess.PIPE
        command = ("-m", f"{__package__}.trial_child")
        self._child = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        verdict = await _exchange(self._child, self._opening)
        if verdict.error is not None:
            raise ValueError(verdict.error)
        return self._child

    async def close(self) -> None:
        """End the child; the next grammar gets a new one."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        assert child.stdin is not None
        child.stdin.close()
        await child.wait()


async def _exchange(child: asyncio.subprocess.Process, message: Any) -> Verdict:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(pack(message))
    await child.stdin.drain()
    (size,) = struct.unpack("<I", await child.stdout.readexactly(4))
    return msgspec.msgpack.decode(await child.stdout.readexactly(size), type=Verdict)


def pack(message: Any) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body

"""The sandbox process: compiles grammars from standard input, and replies."""

from __future__ import annotations

import importlib
import os
import resource
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from ...protocols.grammars import GrammarSpec, Vocabulary
from .compile_sandbox import Result, Setup, pack
from .probe import probe, walk
from .stacks import SANDBOX_STACK, SANDBOX_WALK_STACK, call_with_stack

T = TypeVar("T")


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What a backend prints must not get between the frames.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # Crashes are expected here.
    requests = sys.stdin.buffer
    setup = _read(requests, Setup)
    if setup is None:
        return
    vocabulary = _vocabulary(setup)
    try:
        backend = _backend(setup, vocabulary)
    except Exception as error:
        _reply(replies, Result(error=f"{type(error).__name__}: {error}"))
        return
    _limit_memory(setup.memory_bytes)
    _reply(replies, Result())
    while (spec := _read(requests, GrammarSpec)) is not None:
        _limit_time(setup.compile_seconds)
        _reply(replies, _try(backend, spec, vocabulary))


def _backend(setup: Setup, vocabulary: Vocabulary) -> Any:
    sys.path += [path for path in setup.import_path if path not in sys.path]
    module, _, name = setup.backend.partition(":")
    backend: Any = importlib.import_module(module)
    for part in name.split("."):
        backend = getattr(backend, part)
    return backend(vocabulary)


def _vocabulary(setup: Setup) -> Vocabulary:
    single = {text: i for i, text in enumerate(setup.token_bytes) if len(text) == 1}

    def encode(text: str) -> list[int]:
        return [single[bytes([b])] for b in text.encode() if bytes([b]) in single]

    return Vocabulary(
        token_bytes=setup.token_bytes,
        size=setup.size,
        eos_token_ids=setup.eos_token_ids,
        encode=encode,
        compact_json=setup.compact_json,
        special_tokens=setup.special_tokens,
    )


def _try(backend: Any, spec: GrammarSpec, vocabulary: Vocabulary) -> Result:
    """Compile and probe with smaller stacks than the engine's."""
    try:
        grammars = [call_with_stack(SANDBOX_STACK, backend.compile, spec)]
        return Result(seconds=call_with_stack(SANDBOX_WALK_STACK, _walk, grammars, vocabulary))
    except MemoryError as error:
        return Result(error=f"MemoryError: {error} (compile_memory)", exhausted=True)
    except Exception as error:
        return Result(error=str(error) or type(error).__name__)


def _walk(grammars: list[Any], vocabulary: Vocabulary) -> float:
    """Probe the grammar, and free it on this thread, as freeing may recurse."""
    grammar = grammars.pop()
    return max(probe(grammar, vocabulary), walk(grammar, vocabulary))


def _limit_memory(more: int) -> None:
    """Limit the address space to `more` additional bytes (Linux only)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


def _limit_time(seconds: float) -> None:
    """Limit the processor time, in case the parent, which is stricter, has ended."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + 8 * seconds) + 10, hard))


def _read(stream: BinaryIO, kind: type[T]) -> T | None:
    header = stream.read(4)
    if len(header) < 4:
        return None
    (size,) = struct.unpack("<I", header)
    return msgspec.msgpack.decode(stream.read(size), type=kind)


def _reply(stream: BinaryIO, result: Result) -> None:
    stream.write(pack(result))
    stream.flush()


if __name__ == "__main__":
    main()

"""The process in which costly grammars are tried: reads frames, compiles, says how it went."""

from __future__ import annotations

import importlib
import os
import resource
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from ..protocols import GrammarSpec, Vocabulary
from .probe import probe
from .trial import Opening, Verdict, pack

T = TypeVar("T")


def main() -> None:
    """Serve until the parent closes the pipe."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What a backend prints must not get between the frames.
    requests = sys.stdin.buffer
    opening = _read(requests, Opening)
    if opening is None:
        return
    vocabulary = _vocabulary(opening)
    try:
        backend = _backend(opening, vocabulary)
    except Exception as error:
        _reply(replies, Verdict(error=f"{type(error).__name__}: {error}"))
        return
    _limit_memory(opening.memory_bytes)
    _reply(replies, Verdict())
    while (spec := _read(requests, GrammarSpec)) is not None:
        _reply(replies, _try(backend, spec, vocabulary))


def _backend(opening: Opening, vocabulary: Vocabulary) -> Any:
    sys.path[:] = opening.import_path
    module, _, name = opening.backend.partition(":")
    backend: Any = importlib.import_module(module)
    for part in name.split("."):
        backend = getattr(backend, part)
    return backend(vocabulary)


def _vocabulary(opening: Opening) -> Vocabulary:
    single = {written: i for i, written in enumerate(opening.token_bytes) if len(written) == 1}

    def encode(text: str) -> list[int]:
        """Byte by byte: right, if not as the tokenizer would cut it."""
        return [single[bytes([b])] for b in text.encode() if bytes([b]) in single]

    return Vocabulary(
        token_bytes=opening.token_bytes,
        size=opening.size,
        eos_token_ids=opening.eos_token_ids,
        encode=encode,
        compact_json=opening.compact_json,
        special_tokens=opening.special_tokens,
    )


def _try(backend: Any, spec: GrammarSpec, vocabulary: Vocabulary) -> Verdict:
    try:
        return Verdict(seconds=probe(backend.compile(spec), vocabulary))
    except Exception as error:
        return Verdict(error=str(error) or type(error).__name__)


def _limit_memory(more: int) -> None:
    """`more` bytes of address space beyond what there is now (Linux; elsewhere no limit)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


def _read(stream: BinaryIO, kind: type[T]) -> T | None:
    header = stream.read(4)
    if len(header) < 4:
        return None
    (size,) = struct.unpack("<I", header)
    return msgspec.msgpack.decode(stream.read(size), type=kind)


def _reply(stream: BinaryIO, verdict: Verdict) -> None:
    stream.write(pack(verdict))
    stream.flush()


if __name__ == "__main__":
    main()

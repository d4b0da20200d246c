"""Calls with a stack of a chosen size, for native parsers that recurse as deep as their input."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

ENGINE_STACK = 64 << 20
"""Bytes of stack (address space; used as needed) for compiling in the engine's process."""
SANDBOX_STACK = 16 << 20
"""Bytes for compiling in the sandbox: what fits there fits the engine's process four times."""
SANDBOX_WALK_STACK = 512 << 10
"""Bytes for masks and tokens in the sandbox. The smallest stack that they meet in the engine's
process is 2 MiB: that of llguidance's own threads."""

_stack_size = threading.Lock()
"""`threading.stack_size` is one setting for the whole process."""


def call_with_stack(size: int, function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, called on a new thread with `size` bytes of stack."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function(*args))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="jackfield-grammar-stack", daemon=True)
    with _stack_size:
        before = threading.stack_size(size)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors.pop()
    return results.pop()

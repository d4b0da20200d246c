"""Calls with a chosen stack size, for recursive native parsers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

ENGINE_STACK = 64 << 20
"""Stack for compiling in the engine's process (address space)."""
SANDBOX_STACK = 16 << 20
"""Stack for compiling in the sandbox: a quarter of the engine's."""
SANDBOX_WALK_STACK = 512 << 10
"""Stack for masks and tokens in the sandbox. The smallest in the engine is 2 MiB: llguidance's
threads."""

_stack_size = threading.Lock()
"""`threading.stack_size` is process-wide."""


def call_with_stack(size: int, function: Callable[..., T], *args: Any) -> T:
    """Call on a new thread with `size` bytes of stack."""
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

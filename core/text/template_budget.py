"""What rendering a template may cost, and the count of what it has cost.

Loop turns, calls, filters, tests, comparisons, operators, slices and outputs spend the rendering's
budget. An operation's input is bounded first, because a call into C cannot be stopped.
"""

from __future__ import annotations

import contextvars
import sys
import time
from collections.abc import Iterator, Mapping, MappingView
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_OUTPUT = 16 * 2**20
"""Most characters of a rendering, of any string built, and of all strings in an operation's input,
counting repetitions."""
MAX_STEPS = 1_000_000
"""One step: a loop turn, call or operation; 256 bytes built; 1,024 characters or 4 values read."""
MAX_SECONDS = 5.0


class Budget:
    """Of one rendering."""

    def __init__(self, steps: int | None = None) -> None:
        """steps: default MAX_STEPS."""
        self._steps = MAX_STEPS if steps is None else steps
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, steps: int = 1) -> None:
        """Count steps. Raises SecurityError."""
        before = self._steps
        self._steps -= steps
        if self._steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")
        if before >> 6 != self._steps >> 6 and time.monotonic() > self._deadline:
            raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")


current_budget: contextvars.ContextVar[Budget] = contextvars.ContextVar("template_budget")


def built(value: Any) -> Any:
    """Count a built value, and return it."""
    if isinstance(value, str | bytes):
        check_size(len(value))
        current_budget.get().spend(sys.getsizeof(value) >> 8)
    elif isinstance(value, list | tuple | dict):
        current_budget.get().spend(len(value) >> 3)
    return value


def count_input(*values: Any) -> int:
    """Count everything in values with repetitions (a list may contain one long text many times);
    return the characters.
    """
    budget = current_budget.get()
    size = seen = 0
    waiting = list(values)
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | MappingView):
            waiting += item  # type: ignore[arg-type]
        elif isinstance(item, Namespace):
            waiting.append(item._Namespace__attrs)  # type: ignore[attr-defined]
        seen += 1
        if not seen & 3:
            budget.spend()
        if size + seen > MAX_OUTPUT or len(waiting) > MAX_OUTPUT:
            check_size(MAX_OUTPUT + 1)
    budget.spend(size >> 10)
    return size


def is_sized(value: Any) -> bool:
    return isinstance(value, str | list | tuple | bytes)


def check_size(size: int) -> None:
    if size > MAX_OUTPUT:
        raise SecurityError(f"it writes more than {MAX_OUTPUT} characters")


def in_full(value: Any) -> Any:
    """Return an iterator's items as a list, to be counted first."""
    if not isinstance(value, Iterator | MappingView):
        return value
    items: list[Any] = []
    for item in value:  # type: ignore[union-attr]
        current_budget.get().spend()
        items.append(item)
    return items


def check_bits(bits: int) -> None:
    if bits > 4096:
        raise SecurityError("it computes with numbers of more than 4096 bits")

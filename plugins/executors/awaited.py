"""Steps, jobs and starts whose end is awaited."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Awaited:
    """A step or job whose end is not known."""

    future: asyncio.Future[Any]
    waits_for: set[int]
    """Other ranks that have not said that they have done it: only of a job."""
    own_done: bool = False
    result: Any = None
    """Rank 0's, once `own_done`."""
    failures: dict[int, BaseException] = field(default_factory=dict)
    """By rank."""
    disputed: bool = False
    """Whether it has failed on some ranks, and a time is set for the others."""


def set_once(future: asyncio.Future[Any], value: Any) -> None:
    """Set a future's result or exception, unless it has one."""
    if future.done():
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)


def retrieve(future: asyncio.Future[Any]) -> None:
    """Look at a future's exception, which is reported elsewhere."""
    if not future.cancelled():
        future.exception()

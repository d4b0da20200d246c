"""Allowances: what requests must have besides a slot and blocks for their tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from ..request import Request
from ..step import EncodeItem, TableWrite


class Granted(NamedTuple):
    """What a plan carries for a request that was given an allowance."""

    table_writes: tuple[TableWrite, ...] = ()
    encode: tuple[EncodeItem, ...] = ()


class Allowance(ABC):
    """Something limited that a request needs while it has a slot. The scheduler asks for its cost,
    takes it, and gives it back, and does not know what it is.

    Calls of a plan: `begin_plan`; then, for each request that is to be admitted, `cost` and, if
    there is room, `take`. `give_back` follows at any later time, once for each `take`.
    """

    @abstractmethod
    def begin_plan(self) -> None:
        """Open what may be taken at most in one plan."""

    @abstractmethod
    def cost(self, request: Request) -> int | None:
        """Return the free KV blocks that `take` needs at most; None: it must wait for another plan.
        Changes nothing."""

    @abstractmethod
    def take(self, request: Request) -> Granted:
        """Give a request, which has a slot and its blocks by now, its allowance."""

    @abstractmethod
    def give_back(self, request: Request) -> None:
        """Take it from a request that leaves its slot: it ended, or was preempted."""

    @abstractmethod
    def invalidate(self, request: Request) -> None:
        """Let no other request find what a failed one has, which may be wrong. Before
        `give_back`; a request without an allowance may come, too."""

    @abstractmethod
    def held_blocks(self, running: Iterable[Request]) -> list[int]:
        """Return the KV blocks in use, one entry per holder. Raises AssertionError unless exactly
        the running requests have an allowance."""

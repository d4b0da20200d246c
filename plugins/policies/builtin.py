"""First come first served, and by priority."""

from __future__ import annotations

from typing import Any

from ...core.request import Request


class FirstComeFirstServed:
    def key(self, request: Request) -> tuple[Any, ...]:
        return (request.arrival,)


class Priority:
    """Lower `priority` first, then by arrival."""

    def key(self, request: Request) -> tuple[Any, ...]:
        return (request.priority, request.arrival)

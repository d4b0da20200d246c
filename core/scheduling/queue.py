"""The waiting requests, in policy order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from .request import Request, Status


class WaitingQueue:
    """A heap by `Request.sort_key`. Requests that ended meanwhile are skipped lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[object, int, Request]] = []
        self._order = itertools.count()
        self._members: set[int] = set()

    def push(self, request: Request) -> None:
        """Add a waiting or preempted request."""
        heapq.heappush(self._heap, (request.sort_key, next(self._order), request))
        self._members.add(id(request))

    def pop(self) -> Request | None:
        """The first one, or None."""
        while self._heap:
            request = heapq.heappop(self._heap)[2]
            if id(request) in self._members and request.status is not Status.FINISHED:
                self._members.discard(id(request))
                return request
        return None

    def remove(self, request: Request) -> None:
        """Forget a request that ended while waiting."""
        self._members.discard(id(request))

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return (entry[2] for entry in self._heap if id(entry[2]) in self._members)

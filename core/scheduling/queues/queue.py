"""A list of requests kept in policy order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from ...request import Request

_order = attrgetter("order")


class RequestQueue:
    """Sorted by `Request.order`, which is unique and constant."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def add(self, request: Request) -> None:
        insort(self.requests, request, key=_order)

    def remove(self, request: Request) -> None:
        """Raises ValueError, unchanged, if the request is absent."""
        index = bisect_left(self.requests, request.order, key=_order)
        if index == len(self.requests) or self.requests[index] is not request:
            raise ValueError(f"request {request.request_id!r} is not in this queue")
        del self.requests[index]

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

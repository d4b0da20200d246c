"""Stored responses in memory, bounded in number and bytes; the oldest are dropped first.

They are JSON text, which keeps no engine object alive.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from ...http.context import encoder
from .item_kinds import Item


class StoredResponse(msgspec.Struct, frozen=True):
    body: bytes
    """The response as retrieved."""
    input: bytes
    """JSON list of all items before its output, earlier responses' included."""
    own: tuple[str, ...]
    """Ids of its own input and output items."""
    events: bytes = b""
    """Frames of its stream, if it can be repeated."""
    owner: str = ""
    """Tenant that created it; invisible to others."""

    @property
    def num_bytes(self) -> int:
        ids = sum(map(sys.getsizeof, self.own))
        return len(self.body) + len(self.input) + len(self.events) + ids

    def response(self) -> dict[str, Any]:
        response: dict[str, Any] = msgspec.json.decode(self.body)
        return response

    def items(self) -> list[Item]:
        items: list[Item] = msgspec.json.decode(self.input)
        return items

    def conversation(self) -> list[Item]:
        output: list[Item] = self.response()["output"]
        return self.items() + output


class ResponseStore:
    """Responses by id. A limit of 0 stores nothing."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        """By (owner, id): owners may choose ids, and see none of each other's."""
        self._brought_by: dict[tuple[str, str], str] = {}
        """(owner, item id) → id of the response that added it."""

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def enabled(self) -> bool:
        return self.max_count > 0 and self.max_bytes > 0

    def put(
        self,
        body: dict[str, Any],
        input: list[Item],
        own_input: list[Item],
        events: bytes = b"",
        owner: str = "",
    ) -> None:
        """Store a response, dropping old ones for room, unless it alone is too large.

        input: all items before its output; own_input: its own.
        """
        own = tuple(item["id"] for item in (*own_input, *body["output"]))
        response = StoredResponse(encoder.encode(body), encoder.encode(input), own, events, owner)
        self.delete(body["id"], owner)
        if not self.enabled or response.num_bytes > self.max_bytes:
            return
        self._responses[owner, body["id"]] = response
        self._brought_by.update(((owner, item), body["id"]) for item in own)
        self.num_bytes += response.num_bytes
        while len(self._responses) > self.max_count or self.num_bytes > self.max_bytes:
            oldest_owner, oldest = next(iter(self._responses))
            self.delete(oldest, oldest_owner)

    def get(self, id: str, owner: str) -> StoredResponse | None:
        """Return this owner's response, or None."""
        return self._responses.get((owner, id))

    def delete(self, id: str, owner: str) -> bool:
        """Delete this owner's response; return whether it existed."""
        response = self._responses.pop((owner, id), None)
        if response is None:
            return False
        self.num_bytes -= response.num_bytes
        for item in response.own:
            if self._brought_by.get((response.owner, item)) == id:
                del self._brought_by[response.owner, item]
        return True

    def finder(self, owner: str) -> Callable[[str], Item | None]:
        """Return a lookup of items by id in this owner's responses, which decodes each response
        once.
        """
        read: dict[str, dict[str, Item]] = {}

        def find(id: str) -> Item | None:
            brought_by = self._brought_by.get((owner, id), "")
            if brought_by not in read:
                response = self.get(brought_by, owner)
                items = (
                    [] if response is None else [*response.items(), *response.response()["output"]]
                )
                read[brought_by] = {item["id"]: item for item in reversed(items)}
            return read[brought_by].get(id)

        return find

"""Responses that were asked to be kept: in memory, bounded in number and bytes, oldest out first.

What is kept is JSON text; nothing of an engine stays alive by it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from .context import encoder
from .responses_input import Item


class StoredResponse(msgspec.Struct, frozen=True):
    """One response that has ended."""

    body: bytes
    """The response, as it is retrieved."""
    input: bytes
    """A list of items: all that came before its output, earlier responses' included."""
    own: tuple[str, ...]
    """Ids of the items that this response brought: its own input and its output."""
    events: bytes = b""
    """The stream, if it can be followed again."""
    owner: str = ""
    """Of the tenant that made it: for others, it is not here."""

    @property
    def num_bytes(self) -> int:
        ids = sum(map(sys.getsizeof, self.own))
        return len(self.body) + len(self.input) + len(self.events) + ids

    def response(self) -> dict[str, Any]:
        made: dict[str, Any] = msgspec.json.decode(self.body)
        return made

    def items(self) -> list[Item]:
        made: list[Item] = msgspec.json.decode(self.input)
        return made

    def conversation(self) -> list[Item]:
        """Input and output: what a following response goes on from. Calls that were cut off are
        left out, for they cannot be answered."""
        said = [
            item
            for item in self.response()["output"]
            if item["type"] != "function_call" or item["status"] == "completed"
        ]
        return self.items() + said


class ResponseStore:
    """Id → response, at most so many and so many bytes. A limit of 0 keeps nothing."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._brought_by: dict[str, str] = {}
        """Item id → id of the response that brought it."""

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
        """Keep a response, dropping the oldest ones for it. One that alone is too large is not
        kept.

        input: all items before its output; own_input: those of them that it brought itself.
        """
        own = tuple(item["id"] for item in (*own_input, *body["output"]))
        made = StoredResponse(encoder.encode(body), encoder.encode(input), own, events, owner)
        self.delete(body["id"])
        if not self.enabled or made.num_bytes > self.max_bytes:
            return
        self._responses[body["id"]] = made
        self._brought_by.update(dict.fromkeys(own, body["id"]))
        self.num_bytes += made.num_bytes
        while len(self._responses) > self.max_count or self.num_bytes > self.max_bytes:
            self.delete(next(iter(self._responses)))

    def get(self, id: str, owner: str) -> StoredResponse | None:
        """What is here for this owner."""
        found = self._responses.get(id)
        return found if found is not None and found.owner == owner else None

    def delete(self, id: str) -> bool:
        """→ whether it was there."""
        gone = self._responses.pop(id, None)
        if gone is None:
            return False
        self.num_bytes -= gone.num_bytes
        for item in gone.own:
            if self._brought_by.get(item) == id:
                del self._brought_by[item]
        return True

    def finder(self, owner: str) -> Callable[[str], Item | None]:
        """A function from an item's id to the item that one of this owner's kept responses brought.
        It reads each response once, however many of its items it is asked for."""
        read: dict[str, dict[str, Item]] = {}

        def find(id: str) -> Item | None:
            brought_by = self._brought_by.get(id, "")
            if brought_by not in read:
                kept = self.get(brought_by, owner)
                known = [] if kept is None else [*kept.items(), *kept.response()["output"]]
                read[brought_by] = {item["id"]: item for item in reversed(known)}
            return read[brought_by].get(id)

        return find

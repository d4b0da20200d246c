"""Rows in the place of embeddings: when items of prompts are encoded, and which outputs of the
encoder are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ...cache.kv_manager import PrefixHits
from ...parts.input_embeds import NAME, InputEmbedsPlan, ItemToEncode, RequestItems, SlotItems
from ...parts.media import MediaItem, PlacedItem
from ...request import Request
from ...step import StepResult
from ..plan_builder import PlanBuilder
from .part import PartServices, SchedulerPart


class InputEmbeds(SchedulerPart):
    """Encodes items with the first plan whose rows reach them.

    A plan encodes as many rows as it may have tokens, or one item. Outputs are kept by content
    while rows need them, then until others need the room; an item that finds none ends the chunk
    before it.
    """

    name = NAME

    def __init__(self, services: PartServices, most_kept: int) -> None:
        """most_kept: rows of outputs that are kept; more if one item, or one prompt that cannot be
        split, has more, and for items that are a prompt's last token."""
        self._block_size = services.kv.block_size
        self._budget = services.max_num_batched_tokens
        self._chunked = services.chunked
        self._most_kept = most_kept
        self._builder: PlanBuilder | None = None
        self._kept: OrderedDict[str, int] = OrderedDict()
        """Digest → rows, longest unused first."""
        self._users: dict[str, int] = {}
        """Digest → requests whose next rows need it."""
        self._held: dict[str, dict[int, str]] = {}
        """Request id → numbers of its items that it holds → digests."""
        self._touched: set[str] = set()
        """Digests that rows of the plan that is being made need."""
        self._doubtful: set[str] = set()
        """Digests of requests that failed: not kept once they are not needed."""
        self._encode: list[ItemToEncode] = []
        self._encoded_rows = 0
        self._drop: list[str] = []
        self._drop_all = False
        self._num_encoded = 0
        self._num_found = 0

    @classmethod
    def maker(
        cls, most_kept: int, whole_items: bool = False, whole_prompts: bool = False
    ) -> Callable[[PartServices], InputEmbeds]:
        """whole_items, whole_prompts: their tokens are computed in one step."""
        kind = PromptInputEmbeds if whole_prompts else SpanInputEmbeds if whole_items else cls
        return lambda services: kind(services, most_kept)

    def spans(self, request: Request) -> Iterable[tuple[int, int]]:
        """Return where the parts of its prompt begin and end that are computed in one step each, in
        order."""
        return ()

    # ------------------------------------------------------------ rows

    def begin_plan(self, builder: PlanBuilder) -> None:
        self._builder = builder
        # Of a plan that was not made, as its only row found no blocks.
        self._touched.clear()
        for item in self._encode:
            if item.digest not in self._users:
                del self._kept[item.digest]
        self._encode = [item for item in self._encode if item.digest in self._users]
        self._encoded_rows = sum(item.num_rows for item in self._encode)

    def cost(self, request: Request, hits: PrefixHits) -> int | None:
        """Return 0, or None if its first row would be empty."""
        computed = hits.num_blocks * self._block_size
        assert self._builder is not None
        end = self._least_end(request, computed)
        if end - computed > self._builder.budget:
            return None
        reached = (item for item in _items(request) if item.start < end and item.end > computed)
        return 0 if all(self._is_possible(request, item) for item in reached) else None

    def _least_end(self, request: Request, computed: int) -> int:
        """Return where a row from there on ends at the least."""
        end = computed + 1
        for start, stop in self.spans(request):
            if start < end < stop:
                end = stop
        for item in _items(request):
            if _is_last(request, item) and item.start == end:
                end = item.end
        return end

    def look_at(self, request: Request) -> int | None:
        computed = request.num_computed_tokens
        item = next((item for item in _items(request) if item.end > computed), None)
        return None if item is None else _latest_end(request, item)

    def chunk_tokens(self, request: Request, count: int) -> int:
        computed = request.num_computed_tokens
        end = self._end_before(request, computed + count)
        for number, item in enumerate(_items(request)):
            if item.end <= computed:
                continue
            latest = _latest_end(request, item)
            if latest >= end:
                break
            if item.start >= end or not self._hold(request, number, item):
                return max(0, self._end_before(request, latest) - computed)
        return max(0, end - computed)

    def _end_before(self, request: Request, end: int) -> int:
        """Return `end`, or the start of a span that must not be split there."""
        return next((start for start, stop in self.spans(request) if start < end < stop), end)

    def chunk_planned(self, request: Request) -> None:
        """Give back the outputs that the request's later rows do not need."""
        held = self._held.get(request.request_id)
        if not held:
            return
        items = _items(request)
        for number in [n for n in held if items[n].end <= request.num_computed_tokens]:
            self._release(held.pop(number))

    def start_part(self, request: Request) -> SlotItems | None:
        items = _items(request)
        if not items:
            return None
        return SlotItems(
            tuple(
                PlacedItem(
                    item.start,
                    len(content.token_ids),
                    content.digest,
                    content.runs,
                    content.grid,
                    content.frame_positions,
                )
                for item in items
                for content in (item.content,)
            )
        )

    # ------------------------------------------------------------ outputs

    def _is_possible(self, request: Request, item: MediaItem) -> bool:
        """Return whether an item's output is there, or may be made with this plan."""
        if item.content.digest in self._kept or not self._chunked:
            return True
        rows = item.content.num_rows
        if self._encoded_rows and self._encoded_rows + rows > self._budget:
            return False
        if _is_last(request, item):  # Its request holds the item before it until both are there.
            return True
        needed = sum(self._kept[digest] for digest in self._users.keys() | self._touched)
        return not needed or needed + rows <= self._most_kept

    def _hold(self, request: Request, number: int, item: MediaItem) -> bool:
        """Keep an item's output for a request's rows, made with this plan if need be."""
        held = self._held.setdefault(request.request_id, {})
        if number in held:
            self._touched.add(held[number])
            return True
        if not self._is_possible(request, item):
            return False
        content = item.content
        digest, rows = content.digest, content.num_rows
        if digest in self._kept:
            self._kept.move_to_end(digest)
            self._num_found += 1
        else:
            self._make_room(rows)
            self._kept[digest] = rows
            self._encode.append(ItemToEncode(digest, rows, content.tensors))
            self._encoded_rows += rows
            self._num_encoded += 1
        self._touched.add(digest)
        self._users[digest] = self._users.get(digest, 0) + 1
        held[number] = digest
        return True

    def _make_room(self, rows: int) -> None:
        """Drop outputs that neither this plan nor a later row needs, as far as needed."""
        excess = sum(self._kept.values()) + rows - self._most_kept
        needed = self._users.keys() | self._touched
        for digest in [digest for digest in self._kept if digest not in needed]:
            if excess <= 0:
                break
            excess -= self._kept.pop(digest)
            self._drop.append(digest)

    def _release(self, digest: str) -> None:
        self._users[digest] -= 1
        if self._users[digest]:
            return
        del self._users[digest]
        if digest in self._doubtful and digest not in self._touched:
            self._doubtful.remove(digest)
            del self._kept[digest]
            self._drop.append(digest)

    # ------------------------------------------------------------ plans, ends

    def plan_part(self, step: int, builder: PlanBuilder) -> InputEmbedsPlan | None:
        self._touched.clear()
        if not (self._encode or self._drop or self._drop_all):
            return None
        plan = InputEmbedsPlan(tuple(self._encode), tuple(self._drop), self._drop_all)
        self._encode, self._drop, self._encoded_rows, self._drop_all = [], [], 0, False
        return plan

    def leave(self, request: Request) -> None:
        for digest in self._held.pop(request.request_id, {}).values():
            self._release(digest)

    def invalidate(self, request: Request) -> None:
        """Encode the items again that a failed request has needed."""
        self._doubtful.update(self._held.get(request.request_id, {}).values())

    def step_failed(self, dropped: Iterable[StepResult]) -> None:
        """Forget all outputs: what the plans in flight have encoded is not known."""
        self.abandon()
        self._drop_all = True

    def weights_changed(self) -> None:
        """Forget all outputs: items that rows still need are encoded again."""
        self.abandon()
        self._drop_all = True

    def abandon(self) -> None:
        for kept in (self._kept, self._users, self._held, self._touched, self._doubtful):
            kept.clear()
        self._encode, self._drop, self._encoded_rows = [], [], 0

    @property
    def counts(self) -> dict[str, Any]:
        return {"items_encoded": self._num_encoded, "items_found": self._num_found}

    def held_blocks(self, running: list[Request]) -> Iterable[int]:
        """Return nothing; check that outputs are held by running requests, and for their rows."""
        held = {name for name, numbers in self._held.items() if numbers}
        assert held <= {request.request_id for request in running}, "items of no request"
        counted: dict[str, int] = {}
        for numbers in self._held.values():
            for digest in numbers.values():
                counted[digest] = counted.get(digest, 0) + 1
        assert counted == self._users and set(counted) <= set(self._kept), "items are miscounted"
        return ()


class SpanInputEmbeds(InputEmbeds):
    """Items whose tokens are computed together: steps are as long as they may be."""

    short_steps = False

    def spans(self, request: Request) -> Iterable[tuple[int, int]]:
        return ((item.start, item.end) for item in _items(request))


class PromptInputEmbeds(SpanInputEmbeds):
    """Prompts whose tokens are computed together, also those without items."""

    def spans(self, request: Request) -> Iterable[tuple[int, int]]:
        return ((0, request.num_prompt_tokens),)

    def look_at(self, request: Request) -> int | None:
        return 0 if request.num_computed_tokens < request.num_prompt_tokens else None

    def start_part(self, request: Request) -> SlotItems:
        placed = super().start_part(request) or SlotItems(())
        return msgspec.structs.replace(placed, prompt_span=request.num_prompt_tokens)


def _items(request: Request) -> tuple[MediaItem, ...] | list[MediaItem]:
    own: RequestItems | None = request.parts.get(NAME)
    return () if own is None else own.items  # type: ignore[return-value]


def _latest_end(request: Request, item: MediaItem) -> int:
    """Return where a chunk before an item ends at the latest: a last token alone would be a decode
    row, which parts do not see."""
    return item.start - _is_last(request, item)


def _is_last(request: Request, item: MediaItem) -> bool:
    """Return whether an item is the last token alone."""
    return request.num_tokens - item.start == 1

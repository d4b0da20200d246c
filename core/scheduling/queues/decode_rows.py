"""Finds decoding requests' needs without visiting each."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter

from ...request import Request
from .queue import RequestQueue

_slot, _epoch = attrgetter("slot"), attrgetter("epoch")


def has_prompt_left(request: Request) -> bool:
    """Return whether a running request has more to compute than its last sampled token."""
    left = request.num_tokens - request.num_computed_tokens
    return left > 1 or not request.prompt_computed


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """A plan's decode rows, shared by plans with the same rows."""

    rows: list[Request]
    """In policy order."""
    slots: tuple[int, ...]
    epochs: list[int]
    counts: tuple[int, ...]
    """A token per row."""
    samples: tuple[bool, ...]


class DecodeRows:
    """Knows which running requests decode, and when each needs a block or ends.

    Each plan with decode rows gives one token, so a request needs a block every `block_size` of
    them, and ends after a known number. Plans are counted, and requests filed under the number of
    the plan.

    `num_tokens` and `num_computed_tokens` of a decoding request lag by the plans since the last
    `count_tokens`, until it stops decoding.
    """

    def __init__(self, block_size: int, *, counts_late: bool) -> None:
        """counts_late: whether requests' counters may lag."""
        self._block_size = block_size
        self._counts_late = counts_late
        self._plan = 0
        self._decoding = RequestQueue()
        self._others = RequestQueue()
        """Running requests with prompts left, with their last token in flight, or without a token
        in a plan."""
        self._places: dict[Request, tuple[int, int]] = {}
        """Decoding request → its keys in `_needs_block` and `_ends`."""
        self._needs_block: list[dict[Request, None]] = [{} for _ in range(block_size)]
        """Plan number % block_size → requests that begin a block."""
        self._ends: dict[int, dict[Request, None]] = {}
        """Plan number → requests whose last token is in flight by then."""
        self._num_given = 0
        """Plans that gave all decoding requests a token."""
        self._counted: dict[Request, int] = {}
        """Decoding request → plans counted in it."""
        self._ends_prompt: list[Request] = []
        """Decoding requests whose token of this plan ends their prompt."""
        self._columns: DecodeColumns | None = None

    def __len__(self) -> int:
        return len(self._places)

    # ------------------------------------------------------------ members

    def add(self, request: Request) -> None:
        self._others.add(request)

    def remove(self, request: Request) -> None:
        if request in self._places:
            self._stop(request)
        self._others.remove(request)

    def recount(self, request: Request) -> None:
        """Make a request's counters exact; until the next plan they may change."""
        if request in self._places:
            self._stop(request)

    def _stop(self, request: Request) -> None:
        self.count_tokens([request])
        del self._counted[request]
        block_key, end_key = self._places.pop(request)
        del self._needs_block[block_key][request]
        ending = self._ends[end_key]
        del ending[request]
        if not ending:
            del self._ends[end_key]
        self._decoding.remove(request)
        self._others.add(request)
        self._columns = None

    def _decode(self, request: Request) -> None:
        plan, size = self._plan, self._block_size
        block_key = (plan - request.num_kv_tokens) % size
        end_key = plan + request.max_total_tokens - request.num_tokens
        self._places[request] = block_key, end_key
        self._counted[request] = self._num_given
        self._needs_block[block_key][request] = None
        self._ends.setdefault(end_key, {})[request] = None
        self._others.remove(request)
        self._decoding.add(request)
        self._columns = None

    # ------------------------------------------------------------ plans

    def begin_plan(self) -> list[Request]:
        """Begin the next plan. Return running requests that need tokens but do not decode, in
        policy order.
        """
        self._plan += 1
        self._ends_prompt = []
        for request in list(self._ends.get(self._plan, ())):
            self._stop(request)
        left = []
        for request in self._others.requests[:]:
            if request.num_tokens - request.num_computed_tokens > 1:
                left.append(request)
            elif request.num_tokens < request.max_total_tokens:
                if not request.prompt_computed:
                    self._ends_prompt.append(request)
                self._decode(request)
        return left

    def prompts(self) -> list[Request]:
        """Return the running requests with prompts left, in policy order, for a plan without decode
        rows.
        """
        return [request for request in self._others if has_prompt_left(request)]

    def needing_blocks(self) -> Collection[Request]:
        """Return the decoding requests that begin a block in this plan, with exact counters."""
        requests = self._needs_block[self._plan % self._block_size]
        self.count_tokens(requests)
        return requests

    def give_tokens(self) -> None:
        self._num_given += 1
        # Others may wait until a prompt is computed.
        self.count_tokens(self._ends_prompt if self._counts_late else None)

    def count_tokens(self, requests: Iterable[Request] | None = None) -> None:
        """Update counters of some decoding requests; None: of all."""
        counted, num_given = self._counted, self._num_given
        for request in counted if requests is None else requests:
            if missing := num_given - counted[request]:
                counted[request] = num_given
                request.num_computed_tokens += missing
                request.num_tokens += missing

    def columns(self) -> DecodeColumns:
        if self._columns is None:
            rows = self._decoding.requests[:]
            count = len(rows)
            self._columns = DecodeColumns(
                rows=rows,
                slots=tuple(map(_slot, rows)),
                epochs=list(map(_epoch, rows)),
                counts=(1,) * count,
                samples=(True,) * count,
            )
        return self._columns

    def settle(self, rows: Iterable[Request]) -> None:
        """Drop the decoding requests without a token in this plan. rows: those with one."""
        rows_with_tokens = set(rows)
        for request in [each for each in self._places if each not in rows_with_tokens]:
            self._stop(request)

    # ------------------------------------------------------------ looking in

    def check(self, running: Iterable[Request]) -> None:
        """Raise AssertionError on inconsistency between plans. Counters are exact afterwards."""
        self.count_tokens()
        everyone = sorted(
            [*self._decoding.requests, *self._others.requests], key=lambda each: each.order
        )
        assert everyone == list(running), "the decoding requests and the others do not run"
        for members in (self._places, self._counted):
            assert set(members) == set(self._decoding.requests), "decoding, without a place"
        following = self._plan + 1
        for request, (block_key, end_key) in self._places.items():
            assert request.num_tokens - request.num_computed_tokens == 1, "does not decode"
            left = (-request.num_kv_tokens) % self._block_size
            assert (following + left) % self._block_size == block_key, "a block at a wrong plan"
            rest = request.max_total_tokens - request.num_tokens
            assert end_key == following + rest, "ends at a wrong plan"
            assert request in self._needs_block[block_key], "its block is not at its plan"
            assert request in self._ends[end_key], "its end is not at its plan"
        for book in (self._needs_block, self._ends.values()):
            assert sum(map(len, book)) == len(self._places), "a request stands at two plans"

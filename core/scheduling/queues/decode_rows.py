"""The requests that decode: what the next plan must do for each, found without looking at each."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter

from ...request import Request
from .queue import RequestQueue

_slot, _epoch = attrgetter("slot"), attrgetter("epoch")


def has_prompt_left(request: Request) -> bool:
    """Return whether a running request has more to compute than one token that was sampled."""
    left = request.num_tokens - request.num_computed_tokens
    return left > 1 or not request.prompt_computed


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """The decode rows of a plan. Plans with the same rows share it."""

    rows: list[Request]
    """In policy order."""
    slots: tuple[int, ...]
    epochs: list[int]
    counts: tuple[int, ...]
    """A token for each row."""
    samples: tuple[bool, ...]


class DecodeRows:
    """Knows which running requests decode, and when each needs a block or has its last token.

    A decoding request gets one token with each plan that has decode rows, so it needs a block with
    every `block_size`-th of them, and its last token after a number of them that is known. These
    plans are counted, and requests that need something stand under the number of the plan.

    Tokens are not counted in each request either: `num_tokens` and `num_computed_tokens` of a
    decoding request are too low by the plans since the last `count_tokens`. They are right again
    once it does not decode any more.
    """

    def __init__(self, block_size: int, *, counts_late: bool = True) -> None:
        """counts_late: whether tokens of decoding requests may be counted in the requests later."""
        self._block_size = block_size
        self._counts_late = counts_late
        self._plan = 0
        """Number of the plan that is being made."""
        self._decoding = RequestQueue()
        self._others = RequestQueue()
        """Running requests whose prompts are not computed, or whose last token is in flight, and
        those that got no token with a plan."""
        self._places: dict[Request, tuple[int, int]] = {}
        """Decoding request → its key in `_needs_block`, and in `_ends`."""
        self._needs_block: list[dict[Request, None]] = [{} for _ in range(block_size)]
        """Plan number % block_size → requests whose token is the first of a block."""
        self._ends: dict[int, dict[Request, None]] = {}
        """Plan number → requests that get no token any more, as the last one is in flight."""
        self._num_given = 0
        """Plans that gave all decoding requests a token."""
        self._counted: dict[Request, int] = {}
        """Decoding request → how many of these plans its counters have."""
        self._ends_prompt: list[Request] = []
        """Decoding requests whose token of this plan is the last of their prompts."""
        self._columns: DecodeColumns | None = None

    def __len__(self) -> int:
        return len(self._places)

    # ------------------------------------------------------------ members

    def add(self, request: Request) -> None:
        """Add a request that runs from now on."""
        self._others.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request that does not run any more."""
        if request in self._places:
            self._stop(request)
        self._others.remove(request)

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
        block_key = (plan - request.num_computed_tokens) % size
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
        """Begin the next plan. Return the running requests that do not decode and need tokens, in
        policy order."""
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
        """Return the running requests with more to compute than one token that was sampled, in
        policy order. A plan of these alone is not counted: no decoding request gets a token."""
        return [request for request in self._others if has_prompt_left(request)]

    def needing_blocks(self) -> Collection[Request]:
        """Return the decoding requests whose token in this plan is the first of a block. Their
        counters are right."""
        requests = self._needs_block[self._plan % self._block_size]
        self.count_tokens(requests)
        return requests

    def give_tokens(self) -> None:
        """Give every decoding request its token of this plan."""
        self._num_given += 1
        # Others may wait until a prompt is computed.
        self.count_tokens(self._ends_prompt if self._counts_late else None)

    def count_tokens(self, requests: Iterable[Request] | None = None) -> None:
        """Make the counters of some decoding requests right; None: of all."""
        counted, given = self._counted, self._num_given
        for request in counted if requests is None else requests:
            if missing := given - counted[request]:
                counted[request] = given
                request.num_computed_tokens += missing
                request.num_tokens += missing

    def columns(self) -> DecodeColumns:
        """Return the rows of all decoding requests."""
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
        """Take out the decoding requests that got no token with this plan. rows: those that did."""
        given = set(rows)
        for request in [each for each in self._places if each not in given]:
            self._stop(request)

    # ------------------------------------------------------------ looking in

    def check(self, running: Iterable[Request]) -> None:
        """Raise AssertionError if the books contradict the running requests, between plans.
        Counters are right afterwards."""
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
            left = (-request.num_computed_tokens) % self._block_size
            assert (following + left) % self._block_size == block_key, "a block at a wrong plan"
            rest = request.max_total_tokens - request.num_tokens
            assert end_key == following + rest, "ends at a wrong plan"
            assert request in self._needs_block[block_key] and request in self._ends[end_key]
        for book in (self._needs_block, self._ends.values()):
            assert sum(map(len, book)) == len(self._places), "a request stands at two plans"

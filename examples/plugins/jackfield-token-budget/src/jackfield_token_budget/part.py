"""A budget of tokens that the requests of a group share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jackfield import SamplingParams
from jackfield.core.errors import InvalidRequest
from jackfield.core.protocols import PartSetup, StepPart
from jackfield.core.request import Request
from jackfield.core.scheduling.parts.part import PartServices, Readiness, SchedulerPart

GROUP, TOKENS = "budget_group", "budget_tokens"
LONGEST_NAME = 128


class TokenBudget(StepPart):
    """Requests name their group and its budget:

        {"vllm_xargs": {"budget_group": "a", "budget_tokens": 500}}

    A group begins with its first request, whose `budget_tokens` holds for all, and is forgotten
    with the last. It gets no token more than its budget; when that is spent, those that still run
    end with "length".
    """

    parameters = frozenset({GROUP, TOKENS})
    examples = (
        {GROUP: "a", TOKENS: 9},
        {GROUP: "b", TOKENS: 100_000},
        {GROUP: "a", TOKENS: 9},
    )

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        extra = params.extra_args or {}
        group, tokens = extra.get(GROUP), extra.get(TOKENS)
        if not isinstance(group, str) or not 0 < len(group) <= LONGEST_NAME:
            raise InvalidRequest(
                f"{GROUP}: must be a string of 1 to {LONGEST_NAME} characters, got {group!r:.99}",
                param=GROUP,
            )
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise InvalidRequest(
                f"{TOKENS}: must be an integer of at least 1, got {tokens!r:.99}", param=TOKENS
            )

    @classmethod
    def scheduler_part(cls, setup: PartSetup, services: PartServices) -> SchedulerPart:
        return Budgets(services)


@dataclass
class Group:
    """The requests that share a budget, and what is left of it."""

    budget: int
    members: set[Request] = field(default_factory=set)
    num_ended: int = 0
    """Tokens of members that have ended."""
    left: int = 0
    """Tokens that may still be planned; as of the plan that is being made."""

    @property
    def num_known(self) -> int:
        """Tokens that the members have got."""
        return self.num_ended + sum(len(member.output_token_ids) for member in self.members)

    def count(self) -> None:
        """Count what is left: steps in flight sample tokens that are not known yet."""
        pending = sum(member.num_pending_tokens for member in self.members)
        self.left = self.budget - self.num_known - pending


class Budgets(SchedulerPart):
    """Lets a member have a row that samples only while its group has a token left for it.

    What was planned counts until its result is there, so no budget is overdrawn by a step in
    flight; a preempted or failed row gives its tokens back, as its request counts them no longer.
    """

    name = "token_budget"

    def __init__(self, services: PartServices) -> None:
        self._services = services
        self._groups: dict[str, Group] = {}
        self._num_spent = 0

    def _of(self, request: Request) -> Group | None:
        extra = request.params.extra_args
        return None if not extra or GROUP not in extra else self._groups.get(extra[GROUP])

    def added(self, request: Request) -> None:
        extra: dict[str, Any] = request.params.extra_args or {}
        if GROUP in extra:
            group = self._groups.setdefault(extra[GROUP], Group(extra[TOKENS]))
            group.members.add(request)

    def ended(self, request: Request) -> None:
        if (group := self._of(request)) is not None:
            group.members.discard(request)
            group.num_ended += len(request.output_token_ids)
            if not group.members:
                del self._groups[request.params.extra_args[GROUP]]  # type: ignore[index]

    def begin_plan(self, builder: Any) -> None:
        for group in list(self._groups.values()):
            if group.num_known >= group.budget:
                self._end(group)
            else:
                group.count()

    def _end(self, group: Group) -> None:
        """End the members that are left, which have no token in flight."""
        self._num_spent += 1
        for member in list(group.members):
            self._services.end(member, "length")

    def look_at(self, request: Request) -> int | None:
        return None if self._of(request) is None else 0

    def readiness(self, request: Request, hits: Any, reserve: int) -> Readiness:
        group = self._of(request)
        return Readiness.READY if group is None or group.left > 0 else Readiness.LATER

    def chunk_tokens(self, request: Request, count: int) -> int:
        group = self._of(request)
        if group is None or request.num_computed_tokens + count < request.num_tokens:
            return count
        if group.left <= 0:
            return 0
        group.left -= 1
        return count

    def decode_tokens(self, request: Request, count: int, spare: int) -> int:
        group = self._of(request)
        if group is None:
            return count
        count = max(0, min(count, group.left))
        group.left -= count
        return count

    @property
    def counts(self) -> dict[str, Any]:
        """Budgets that were spent."""
        return {"budgets_spent": self._num_spent}

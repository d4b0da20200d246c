"""Requests whose activations grow too large end with an error, before they say more nonsense."""

from __future__ import annotations

from typing import Any

import msgspec

from jackfield import SamplingParams
from jackfield.core.errors import InvalidRequest, RequestFailed
from jackfield.core.protocols import PartSetup, StepPart
from jackfield.core.request import Request
from jackfield.core.scheduling.parts.part import PartServices, SchedulerPart
from jackfield.core.types import PartPlan, StepPlan, StepResult
from jackfield.core.worker.parts.part import PartStart, StartContext

NAME = "activation_watch"
LIMIT = "activation_limit"


class WatchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the part."""

    ends: bool = True
    """Whether requests end; False: their tokens are only counted."""


class WatchStart(msgspec.Struct, frozen=True):
    """With a slot that starts, of a request that is watched."""

    limit: float


class WatchPlan(PartPlan, frozen=True):
    """With a plan that has rows of such requests."""

    rows: tuple[int, ...]


class WatchResult(msgspec.Struct, frozen=True):
    """With the result of such a plan."""

    num_watched: int
    """Tokens."""
    over: dict[int, float]
    """Row → its largest activation, where that is over the limit."""


class ActivationWatch(StepPart):
    """Requests say how large the states that logits are computed from may become:

        {"vllm_xargs": {"activation_limit": 1000.0}}

    Tokens found in the prefix cache are not computed, so they are not watched.
    """

    options = WatchOptions
    parameters = frozenset({LIMIT})
    examples = ({LIMIT: 1e30}, {LIMIT: 1e20})
    excludes = {"pipeline": "the stage that has the last states does not report"}
    start_type, plan_type, result_type = WatchStart, WatchPlan, WatchResult

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        limit = (params.extra_args or {}).get(LIMIT)
        if not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 < limit < 1e300:
            raise InvalidRequest(
                f"{LIMIT}: must be a positive number, got {limit!r:.99}", param=LIMIT
            )

    @classmethod
    def scheduler_part(cls, setup: PartSetup, services: PartServices) -> SchedulerPart:
        options = setup.options
        assert isinstance(options, WatchOptions)
        return Watch(ends=options.ends)

    @classmethod
    def worker_part(cls, setup: PartSetup, start: StartContext) -> PartStart:
        # Imported on the launch thread alone: it needs torch.
        from .on_device import PeaksStart

        return PeaksStart(start)


def is_watched(request: Request) -> bool:
    return LIMIT in (request.params.extra_args or {})


class Watch(SchedulerPart):
    """Says which rows are watched, and what becomes of their requests."""

    name = NAME

    def __init__(self, *, ends: bool) -> None:
        self._ends = ends
        self._num_watched = self._num_over = 0

    def start_part(self, request: Request) -> WatchStart | None:
        extra = request.params.extra_args or {}
        return WatchStart(float(extra[LIMIT])) if LIMIT in extra else None

    def plan_part(self, step: int, builder: Any) -> WatchPlan | None:
        rows = tuple(row for row, request in enumerate(builder.rows) if is_watched(request))
        return WatchPlan(rows) if rows else None

    def begin_result(self, plan: StepPlan, result: StepResult) -> None:
        if (found := result.parts.get(NAME)) is not None:
            self._num_watched += found.num_watched
            self._num_over += len(found.over)

    def settle(self, request: Request, row: int, plan: StepPlan, result: StepResult) -> None:
        found = result.parts.get(NAME)
        if self._ends and found is not None and row in found.over:
            raise RequestFailed(
                f"{LIMIT}: an activation is {found.over[row]:.4g}; the limit is "
                f"{request.params.extra_args[LIMIT]:.4g}"  # type: ignore[index]
            )

    @property
    def counts(self) -> dict[str, Any]:
        """Watched tokens, and rows over their limit."""
        return {"watched_tokens": self._num_watched, "rows_over_limit": self._num_over}

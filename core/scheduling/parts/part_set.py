"""A scheduler's parts, and the parts that override each method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

from ...outputs import EngineStats
from ...request import NEVER, Request
from ...step import StepPlan, StepResult
from .part import PartMaker, PartServices, SchedulerPart

P = TypeVar("P", bound=SchedulerPart)
Calls: TypeAlias = tuple[Callable[..., Any], ...]


class SchedulerParts:
    """All parts. For a method of `SchedulerPart`, the attribute of that name lists the overriding
    parts' methods in order.
    """

    def __init__(self) -> None:
        self._parts: tuple[SchedulerPart, ...] = ()
        self._index()

    def make(self, makers: Iterable[PartMaker], services: PartServices) -> None:
        """Raises ValueError for duplicate names."""
        for maker in makers:
            part = maker(services)
            if any(part.name == other.name for other in self._parts):
                raise ValueError(f"two parts are named {part.name!r}")
            self._parts += (part,)
        self._index()

    def _index(self) -> None:
        self.added = self._having("added")
        self.turns = self._having("turns")
        self.begin_plan = self._having("begin_plan")
        self.readiness = self._having("readiness")
        self.cost = self._having("cost")
        self.no_room = self._having("no_room")
        self.enter = self._having("enter")
        self.admit = self._having("admit")
        self.eligible = self._having("eligible")
        self.look_at = self._having("look_at")
        self.decode_tokens = self._having("decode_tokens")
        self.decides = self._having("decides")
        self.chunk_tokens = self._having("chunk_tokens")
        self.chunk_planned = self._having("chunk_planned")
        self.relieve = self._having("relieve")
        self.rows_chosen = self._having("rows_chosen")
        self.needs_plan = self._having("needs_plan")
        self.must_step = self._having("must_step")
        self.begin_result = self._having("begin_result")
        self._of_rows = [
            (part.concerns_rows, self._calls(part, "settle"), self._calls(part, "kept"))
            for part in self._parts
        ]
        self.leave = self._having("leave")
        self.invalidate = self._having("invalidate")
        self.ended = self._having("ended")
        self.step_failed = self._having("step_failed")
        self.weights_changed = self._having("weights_changed")
        self.abandon = self._having("abandon")
        self.held_blocks = self._having("held_blocks")
        self.awaited = self._having("awaited")
        self.start_part = self._by_name("start_part")
        self.plan_part = self._by_name("plan_part")
        self.not_taken = dict(self._by_name("not_taken"))

    @property
    def looks_at_each_row(self) -> bool:
        """Whether each decoding request must be looked at in every plan."""
        return bool(self.eligible) or len(self.decides) < len(self.decode_tokens)

    def of_rows(self, plan: StepPlan, result: StepResult) -> tuple[Calls, Calls]:
        """Return the parts' `settle` and `kept` that are to be called for a result's rows."""
        settle: list[Callable[..., Any]] = []
        kept: list[Callable[..., Any]] = []
        for concerns_rows, settles, keeps in self._of_rows:
            if (settles or keeps) and concerns_rows(plan, result):
                settle += settles
                kept += keeps
        return tuple(settle), tuple(kept)

    @staticmethod
    def _calls(part: SchedulerPart, method: str) -> list[Callable[..., Any]]:
        """Return the part's method in a list; [] if it does not override it."""
        overrides = getattr(type(part), method) is not getattr(SchedulerPart, method)
        return [getattr(part, method)] if overrides else []

    def _having(self, method: str) -> Calls:
        return tuple(call for _, call in self._by_name(method))

    def _by_name(self, method: str) -> tuple[tuple[str, Callable[..., Any]], ...]:
        default = getattr(SchedulerPart, method)
        return tuple(
            (part.name, getattr(part, method))
            for part in self._parts
            if getattr(type(part), method) is not default
        )

    def __iter__(self) -> Iterator[SchedulerPart]:
        return iter(self._parts)

    def find(self, kind: type[P]) -> P | None:
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def look_again(self, request: Request) -> None:
        """Ask the parts when to see a request's rows next."""
        places = [place for look in self.look_at if (place := look(request)) is not None]
        request.look_at = min(places, default=NEVER)

    @property
    def counts(self) -> dict[str, Any]:
        """Parts' fields of `EngineStats`."""
        fields: dict[str, Any] = {}
        others: dict[str, float] = {}
        for part in self._parts:
            for name, value in part.counts.items():
                if name in EngineStats.__struct_fields__:
                    fields[name] = value
                else:
                    others[f"{part.name}.{name}"] = value
        return {**fields, "part_counts": others} if others else fields

"""A part that compares the attention outputs of two requests, layer by layer.

Requests run one after another. One is the reference, whose outputs are kept from a position on;
those of later ones at the same positions are compared with it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ....core.errors import InvalidRequest
from ....core.hooks import hookimpl
from ....core.protocols import PartSetup, StepPart
from ....core.sampling_params import SamplingParams
from ....core.scheduling.parts.part import PartServices, SchedulerPart
from ....core.step import StepPlan, StepResult
from ....core.worker.parts.part import PartStart, StartContext
from .similarities import COMPARED, NAME, REFERENCE, Similarities


class WatchedFrom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the part."""

    first: int
    """First position."""
    count: int
    """Positions."""


class AttentionSimilarity(StepPart):
    options = WatchedFrom
    parameters = frozenset({NAME})
    examples = ({NAME: REFERENCE}, {NAME: COMPARED})
    excludes = {"pipeline": "the first stage alone reports"}
    result_type = Similarities

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        if (role := (params.extra_args or {}).get(NAME)) not in (REFERENCE, COMPARED):
            raise InvalidRequest(
                f"{NAME}: must be {REFERENCE!r} or {COMPARED!r}, got {role!r:.99}", param=NAME
            )

    @classmethod
    def scheduler_part(cls, setup: PartSetup, services: PartServices) -> SchedulerPart:
        return Sums()

    @classmethod
    def worker_part(cls, setup: PartSetup, start: StartContext) -> PartStart:
        from .watched_layers import WatchStart  # It needs torch.

        options = setup.options
        assert isinstance(options, WatchedFrom)
        return WatchStart(start, options.first, options.count)


class Sums(SchedulerPart):
    name = NAME

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._num_tokens = 0

    def begin_result(self, plan: StepPlan, result: StepResult) -> None:
        similarities: Similarities | None = result.parts.get(NAME)
        if similarities is not None:
            before = self._sums or [0.0] * len(similarities.sums)
            self._sums = [a + b for a, b in zip(before, similarities.sums, strict=True)]
            self._num_tokens += similarities.num_tokens

    @property
    def counts(self) -> dict[str, Any]:
        """Compared tokens, and each layer's sum of cosines."""
        layers = {f"layer_{number}": total for number, total in enumerate(self._sums)}
        return {"tokens": self._num_tokens, **layers}


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_parts(self, registry: Any) -> None:
        registry.add(NAME, AttentionSimilarity)

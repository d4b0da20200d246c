"""The contract of parts: capabilities of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..scheduling.parts.part import PartServices, SchedulerPart
    from ..worker.parts.part import PartStart, StartContext


class NoPartOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a part that has none."""


@dataclass(frozen=True)
class PartSetup:
    """What both halves of a part are made from."""

    name: str
    """Under which the part is registered, and its halves stand in plans and results."""
    options: msgspec.Struct
    """An instance of the part's `options`."""
    config: EngineConfig
    """Resolved."""


class StepPart:
    """A capability of a step, as a plugin. Subclass it.

    A part has a scheduler half (`core.scheduling.parts.part.SchedulerPart`: on the event loop, no
    torch), a worker half (`core.worker.parts.part.WorkerPart`: on each rank's launch thread), or
    both. They exchange structs: with a slot that starts, with a plan, with a result. Each may be
    sent to another process, so it holds plain data.

    An engine has the parts that `EngineConfig.parts` names. Requests address a part by
    `SamplingParams.extra_args` (over HTTP: `vllm_xargs`). A part that raises ends the engine, with
    its name: it decides about all requests at once. Errors of `SchedulerPart.settle` and `kept`,
    which are about one request, and of the worker half in a step, end the requests of that row or
    step. To test a part: `jackfield.plugins.conformance.parts`.
    """

    options: ClassVar[type[msgspec.Struct]] = NoPartOptions
    """Its options in `EngineConfig.parts`."""
    parameters: ClassVar[frozenset[str]] = frozenset()
    """Keys of `extra_args` that it reads. A key that nothing active reads is refused."""
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    """Several different `extra_args`, for the conformance kit."""
    excludes: ClassVar[Mapping[str, str]] = {}
    """Other part, or parallel mode (`core.parts.exclusions`) → why they do not go together, in a
    clause."""
    start_type: ClassVar[type[msgspec.Struct] | None] = None
    """What `SchedulerPart.start_part` returns."""
    plan_type: ClassVar[type[msgspec.Struct] | None] = None
    """What `SchedulerPart.plan_part` returns: a subclass of `PartPlan`."""
    result_type: ClassVar[type[msgspec.Struct] | None] = None
    """What the worker half reports."""

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        """Validate a request, on the event loop. Raises InvalidRequest with the field's name."""

    @classmethod
    def scheduler_part(cls, setup: PartSetup, services: PartServices) -> SchedulerPart:
        """Return the scheduler half, whose `name` is `setup.name`. A part without one does not
        override this."""
        raise NotImplementedError("the part has no scheduler half")

    @classmethod
    def worker_part(cls, setup: PartSetup, start: StartContext) -> PartStart | None:
        """Return what starts the worker half, whose `name` is `setup.name`; None: there is none.
        Called on the launch thread of each rank, when the model is loaded."""
        return None

"""In which order parts get what plans carry, and give what results say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from jackfield.core.step import PartPlan, StepPlan, StepResult
from jackfield.core.worker.launched_step import EmptyStep, LaunchedStep
from jackfield.core.worker.parts.part import Report, WorkerPart
from jackfield.core.worker.parts.part_set import WorkerParts


class Sent(PartPlan, frozen=True):
    """What a plan carries."""

    text: str


class Said(msgspec.Struct, frozen=True):
    """What a result carries."""

    text: str


class Moving(WorkerPart):
    """Moves what is cached, and cannot; reports, and cannot."""

    name = "moving"

    def __init__(self) -> None:
        self.asked = 0

    def move(self, part: PartPlan, plan: StepPlan) -> None:
        raise RuntimeError("nothing moves")

    def after(self, part: PartPlan | None, step: LaunchedStep) -> Report:
        def report() -> Said:
            self.asked += 1
            raise RuntimeError("nothing to say")

        return report


class Posted(WorkerPart):
    """Gets letters, and answers each once."""

    name = "posted"

    def __init__(self) -> None:
        self.received: list[str] = []
        self.answers: list[str] = []
        self.closed = False

    def receive(self, part: PartPlan) -> None:
        assert isinstance(part, Sent)
        self.received.append(part.text)
        self.answers.append(part.text.upper())

    def poll(self) -> Report:
        return lambda: Said(self.answers.pop(0)) if self.answers else None

    def close(self) -> None:
        self.closed = True


def plan_of(**parts: PartPlan) -> StepPlan:
    return StepPlan(step=0, slots=(), num_tokens=(), samples=(), parts=dict(parts))


def launched(plan: StepPlan) -> LaunchedStep:
    return LaunchedStep(plan, [], {}, {}, [], None)


def said(result: StepResult) -> dict[str, Any]:
    return {name: part.text for name, part in result.parts.items()}


def test_what_is_sent_once_arrives_though_another_part_cannot_move() -> None:
    posted = Posted()
    parts = WorkerParts([posted, Moving()])
    with pytest.raises(RuntimeError, match="nothing moves"):
        parts.move(plan_of(posted=Sent("a"), moving=Sent("b")))
    assert posted.received == ["a"]


def test_a_plan_that_is_not_run_is_received_and_moves_nothing() -> None:
    posted = Posted()
    WorkerParts([Moving(), posted]).receive(plan_of(posted=Sent("a"), moving=Sent("b")))
    assert posted.received == ["a"]


def test_a_plan_without_rows_brings_what_was_polled() -> None:
    posted = Posted()
    parts = WorkerParts([posted])
    plan = parts.move(plan_of(posted=Sent("a")))
    assert said(EmptyStep(plan, parts.poll()).wait()) == {"posted": "A"}
    assert said(EmptyStep(plan, parts.poll()).wait()) == {}


def test_a_report_that_raises_leaves_those_that_were_polled_unread() -> None:
    posted, moving = Posted(), Moving()
    parts = WorkerParts([posted, moving])
    plan = parts.move(plan_of(posted=Sent("a")))
    step = launched(plan)
    parts.after(plan, step)
    with pytest.raises(RuntimeError, match="nothing to say"):
        step.wait()
    assert moving.asked == 1
    assert said(EmptyStep(plan, parts.poll()).wait()) == {"posted": "A"}


def test_parts_are_closed_with_the_worker() -> None:
    posted = Posted()
    WorkerParts([Moving(), posted]).close()
    assert posted.closed

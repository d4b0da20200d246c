"""Media in any traffic: every token of an item finds its output, and no request waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
from scheduled import add, make_request, make_scheduler, run
from test_compression_state_machine import NIGHTLY_STEPS, run_machine
from test_scheduler_state_machine import ConnectorMachine, PriorityMachine, ReplayingWorker

from jackfield.core.parts.input_embeds import NAME, InputEmbedsPlan, RequestItems
from jackfield.core.parts.media import (
    MediaContent,
    MediaItem,
    MediaTensor,
    PlacedItem,
    late_extras,
    prompt_extra,
)
from jackfield.core.request import Request
from jackfield.core.scheduling.parts.input_embeds import InputEmbeds
from jackfield.core.scheduling.plan_builder import PlanBuilder
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan

MOST_KEPT = 10
KINDS = 6


def content(number: int, count: int) -> MediaContent:
    """An item of so many tokens, the first and last of which have no row if there are more."""
    runs = ((1, count - 2),) if count > 4 else ((0, count),)
    return MediaContent(
        modality="image", digest=f"picture {number}", token_ids=(7,) * count, runs=runs,
        tensors={"pixels": MediaTensor("uint8", (1,), bytes([number]))},
    )  # fmt: skip


def tokens_of(number: int) -> int:
    """A few, more than a step has, more than are kept."""
    return (1, 2, 5, 6, 12, 18)[number]


def give(request: Request, items: list[MediaItem]) -> None:
    request.parts[NAME] = RequestItems(items)
    request.late_extra = late_extras(items)


def whose(request: Request) -> Any:
    """What KV behind all items depends on."""
    return (request.cache_salt, request.late_extra) if request.late_extra else request.cache_salt


class MediaWorker(ReplayingWorker):
    """Also keeps the outputs of the encoder."""

    whole_spans = False
    most_kept = MOST_KEPT

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outputs: dict[str, int] = {}
        self.items: dict[int, tuple[PlacedItem, ...]] = {}
        self.num_encoded = self.num_parts = 0

    def run(self, plan: StepPlan, *args: Any, **more: Any) -> Any:
        part = plan.parts.get(NAME) or InputEmbedsPlan()
        for digest in tuple(self.outputs) if part.drop_all else part.drop:
            assert part.drop_all or digest in self.outputs, "drops what is not there"
            del self.outputs[digest]
        for item in part.encode:
            assert item.digest not in self.outputs, "encodes what is there"
            assert item.digest == f"picture {item.tensors['pixels'].data[0]}"
            self.outputs[item.digest] = item.num_rows
            self.num_encoded += 1
        new = sum(item.num_rows for item in part.encode)
        assert new <= self.budget or len(part.encode) == 1, "encodes too much at once"
        kept = [count for count in self.outputs.values() if count > 1]  # Others may be last tokens.
        assert sum(kept) <= self.most_kept or len(kept) == 1, "keeps too much"
        for start in plan.starts:
            sent = start.parts.get(NAME)
            self.items[start.slot] = () if sent is None else sent.items
        firsts = dict(self.computed) | {s.slot: s.num_computed_tokens for s in plan.starts}
        for slot, count in zip(plan.slots, plan.num_tokens, strict=True):
            first, end = firsts[slot], firsts[slot] + count
            for item in self.items[slot]:
                if item.start < end and first < item.end:
                    assert item.digest in self.outputs, "a row's item was not encoded"
                    self.num_parts += not (first <= item.start and item.end <= end)
                    if self.whole_spans:
                        assert item.end <= end, "an item is split"
        return super().run(plan, *args, **more)

    def whose(self, slot: int, position: int) -> Any:
        if not self.items[slot]:
            return self.salts[slot]
        salt, items = self.salts[slot]
        before = tuple(item for item in items if item[0] <= position)
        return (salt, before) if before else salt

    def forget(self, slots: set[int]) -> None:
        super().forget(slots)
        self.items.clear()
        self.outputs.clear()  # What the failed steps have encoded is not known.


class MediaMachine(PriorityMachine):
    """Some requests with up to three items, which are a few, one behind the other or not."""

    worker_class = MediaWorker
    media = (MOST_KEPT, False)
    worker: MediaWorker
    kinds = KINDS

    def prepare(self, request: Request) -> Any:
        if request.leader is not None:
            if (media := request.leader.parts.get(NAME)) is not None:
                give(request, list(media.items))
            return whose(request)
        choice = hash((len(request.prompt_token_ids), request.max_tokens, len(self.all)))
        items: list[MediaItem] = []
        place = choice % 3
        for number in range(choice % 4):
            kind = (choice // 7 + number * number) % self.kinds
            count = tokens_of(kind)
            if place + count > request.num_prompt_tokens:
                break
            items.append(MediaItem(place, content(kind, count)))
            place += count + choice // 5 % 3
        if items:
            give(request, items)
        return whose(request)


class MediaConnectorMachine(ConnectorMachine):
    """Beside a KV connector, whose keys tell items apart."""

    worker_class = MediaWorker
    media = (MOST_KEPT, False)
    kinds = KINDS
    prepare = MediaMachine.prepare


class MediaDraftMachine(MediaMachine):
    num_drafts = 3


class SpanWorker(MediaWorker):
    whole_spans = True


class SpanMachine(MediaMachine):
    """The tokens of an item are computed together; none has more than a step."""

    worker_class = SpanWorker
    media = (MOST_KEPT, True)
    kinds = 5


class PromptWorker(MediaWorker):
    most_kept = 4 * 24
    """What the prompts of four slots may need at once."""

    def run(self, plan: StepPlan, *args: Any, **more: Any) -> Any:
        """Check that a prompt's tokens, or what no prefix hit has, are computed together."""
        for start in plan.starts:
            count = plan.num_tokens[plan.slots.index(start.slot)]
            sent = start.parts[NAME]
            assert sent.prompt_span == start.num_prompt_tokens
            assert start.num_computed_tokens + count >= sent.prompt_span, "a prompt is split"
        return super().run(plan, *args, **more)


class PromptMachine(MediaMachine):
    """The tokens of a prompt are computed together, also those of a preempted request."""

    worker_class = PromptWorker
    media = (MOST_KEPT, False, True)
    enable_chunked_prefill = False
    budget = 24

    def prepare(self, request: Request) -> Any:
        super().prepare(request)
        media = request.parts.get(NAME)
        items = () if media is None else media.items
        extra = prompt_extra(request.prompt_token_ids, items)
        request.late_extra = (extra, *request.late_extra)
        return whose(request)


MACHINES = (MediaMachine, MediaConnectorMachine, MediaDraftMachine, SpanMachine, PromptMachine)


@pytest.mark.parametrize("machine", MACHINES)
def test_random_steps(machine: type[PriorityMachine]) -> None:
    run_machine(machine, 700)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_many_random_steps(machine: type[PriorityMachine]) -> None:
    encoded = parts = 0

    class Counting(machine):  # type: ignore[misc, valid-type]
        def teardown(self) -> None:
            nonlocal encoded, parts
            super().teardown()
            encoded += self.worker.num_encoded
            parts += self.worker.num_parts

    run_machine(Counting, NIGHTLY_STEPS)
    assert encoded, "the machine encodes nothing"
    # Of items that are computed together, only a prefix hit computes a part.
    whole = (SpanMachine, PromptMachine)
    assert parts or machine in whole, "no chunk or prefix hit ends inside an item"


# ---------------------------------------------------------------- one thing at a time


def seeing(*kinds: int, gap: int = 2) -> Request:
    items, place = [], gap
    for kind in kinds:
        items.append(MediaItem(place, content(kind, tokens_of(kind))))
        place = items[-1].end + gap
    request = make_request(place + 3, max_tokens=2)
    give(request, items)
    return request


def scheduler(**more: Any) -> Scheduler:
    return make_scheduler(**{"media": (MOST_KEPT, False), "max_num_batched_tokens": 16, **more})


def step(planner: Scheduler) -> tuple[list[str], list[str]]:
    """Run a step. Return what it encodes, and what it drops."""
    plan = planner.schedule()
    assert plan is not None
    part = plan.parts.get(NAME) or InputEmbedsPlan()
    run(planner, plan)
    planner.check_invariants()
    return [item.digest[-1:] for item in part.encode], [digest[-1:] for digest in part.drop]


def test_an_item_is_encoded_once_for_requests_that_come_together() -> None:
    planner = scheduler(enable_prefix_caching=False)
    add(planner, seeing(2), seeing(2))
    assert step(planner) == (["2"], [])
    while planner.num_running or planner.num_waiting:
        assert step(planner) == ([], [])
    add(planner, seeing(2))
    assert step(planner) == ([], []), "it is kept until others need the room"


def test_the_output_that_was_not_used_for_longest_makes_way() -> None:
    planner = scheduler(enable_prefix_caching=False, max_num_seqs=1)
    found = []
    for kind in (2, 3, 2, 4, 2):
        add(planner, seeing(kind))
        while planner.num_running or planner.num_waiting:
            found += [each for each in (step(planner),) if each != ([], [])]
    # 3 and 4 rows fit beside each other, 10 rows stand alone.
    assert found == [(["2"], []), (["3"], []), (["4"], ["3", "2"]), (["2"], ["4"])]


def test_new_weights_encode_again() -> None:
    planner = scheduler(enable_prefix_caching=False)
    add(planner, seeing(2))
    assert step(planner) == (["2"], [])
    while planner.num_running:
        step(planner)
    planner.change_weights("2", "2")
    add(planner, seeing(2))
    plan = planner.schedule()
    assert plan is not None and plan.parts[NAME].drop_all
    assert [item.digest for item in plan.parts[NAME].encode] == ["picture 2"]


def test_a_failed_request_leaves_no_doubtful_output() -> None:
    planner = scheduler(enable_prefix_caching=False)
    add(planner, seeing(5))  # 18 tokens: more than a step has.
    plan = planner.schedule()
    assert plan is not None
    run(planner, plan, failed={0: "on purpose"})
    planner.check_invariants()
    add(planner, seeing(5))
    assert step(planner) == (["5"], ["5"])


def finish(planner: Scheduler, steps: int = 100) -> None:
    for _ in range(steps):
        if not (planner.num_running or planner.num_waiting):
            return
        if (plan := planner.schedule()) is not None:
            assert all(plan.num_tokens), "an empty row"
            run(planner, plan)
        planner.check_invariants()
    raise AssertionError("somebody never finishes")


@pytest.mark.parametrize("before", [1, 15, 16, 17])
@pytest.mark.parametrize("budget", [2, 16])
def test_an_item_that_is_the_last_token_is_never_a_decode_row(before: int, budget: int) -> None:
    planner = scheduler(max_num_batched_tokens=budget)
    request = make_request(before + 1, max_tokens=3)
    give(request, [MediaItem(before, content(0, 1))])
    add(planner, request)
    for _ in range(100):
        computed = request.num_computed_tokens
        plan = planner.schedule()
        assert plan is not None
        if request.num_computed_tokens > before:
            assert computed < before, "the last token came alone"
            break
        run(planner, plan)
    run(planner, plan)
    finish(planner)


def test_an_item_that_is_the_last_token_finds_room_beside_the_one_before() -> None:
    planner = scheduler()
    large = content(5, tokens_of(5))  # More rows than are kept.
    request = make_request(19, max_tokens=1)
    give(request, [MediaItem(0, large), MediaItem(18, content(0, 1))])
    add(planner, request)
    finish(planner)


@pytest.mark.parametrize("budget", [13, 14, 15, 16])
def test_an_item_before_the_last_token_is_not_split_for_it(budget: int) -> None:
    planner = scheduler(media=(MOST_KEPT, True), max_num_batched_tokens=budget)
    request = make_request(15, max_tokens=1)
    give(request, [MediaItem(2, content(4, 12)), MediaItem(14, content(0, 1))])
    add(planner, request)
    ends = []
    while request.num_computed_tokens < 15:
        plan = planner.schedule()
        assert plan is not None
        ends.append(request.num_computed_tokens)
        run(planner, plan)
    assert set(ends) <= {1, 2, 15}, "within an item, or right before the last token"
    finish(planner)


def test_what_a_plan_took_that_was_not_made_leaves_room() -> None:
    """Its only row took an item, and then found no block."""
    planner = scheduler()
    media = planner.part(InputEmbeds)
    assert media is not None
    first, second = seeing(5), seeing(4)
    media.begin_plan(PlanBuilder(16, False, 0))
    assert media.chunk_tokens(first, 16) == 16
    assert media.chunk_tokens(second, 16) < 16, "no room beside the first"
    media.leave(first)
    media.begin_plan(PlanBuilder(16, False, 0))
    assert media.chunk_tokens(second, 16) == 16
    part = media.plan_part(0, PlanBuilder(16, False, 0))
    assert part is not None and [item.digest for item in part.encode] == ["picture 4"]

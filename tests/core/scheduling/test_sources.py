"""Sources of encoder-decoder models: each slot reads its own, encoded before, in any traffic."""

from __future__ import annotations

from typing import Any

import pytest
from scheduled import encoded_by, parts_for
from test_compression_state_machine import NIGHTLY_STEPS, run_machine
from test_scheduler_state_machine import PriorityMachine, ReplayingWorker

from jackfield.core.parts.encoder_decoder import Source
from jackfield.core.request import Request, RequestSpec
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan, StepResult
from jackfield.plugins.policies.builtin import FirstComeFirstServed

SOURCES = [[5], [5, 6, 7, 8], [5, 6, 7, 9], list(range(17)), list(range(11))]


def source_of(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The source of a request is told by its first token."""
    return tuple(SOURCES[tokens[0] % len(SOURCES)])


class SourceWorker(ReplayingWorker):
    """Also keeps what sources' places hold, and for whom."""

    sources: dict[int, tuple[int, ...]]
    num_encoded = 0

    def run(self, plan: StepPlan, salts: dict[str, str | None], *args: Any, **more: Any) -> Any:
        last = len(self.groups)
        tables = {w.block_ids: w.slot for w in plan.table_writes if w.group == last}
        names = {start.slot: start.request_id for start in plan.starts}
        assert sum(len(item.source.token_ids) for item in encoded_by(plan)) <= 17
        for item in encoded_by(plan):
            self.num_encoded += 1
            salt = salts[names[tables[item.block_ids]]]
            assert len(item.block_ids) == -(-len(item.source.token_ids) // self.block_size)
            for place in range(len(item.source.token_ids)):
                block = item.block_ids[place // self.block_size]
                what = ("source", tuple(item.source.token_ids), salt, place)
                self.kv[block, place % self.block_size] = what
        result = super().run(plan, salts, *args, **more)
        for start in plan.starts:
            assert start.parts["encoder_decoder"].num_tokens == len(source_of(start.token_ids))
        for slot in plan.slots:
            source = source_of(tuple(self.tokens[slot]))
            for place in range(len(source)):
                wanted = ("source", source, self.salts[slot], place)
                assert self.kv[self._place(slot, last, place)] == wanted, "another's source"
        return result


class SourceMachine(PriorityMachine):
    """Blocks for two or three requests with their sources."""

    worker_class = SourceWorker
    max_source_tokens = 17

    def source(self, prompt: list[int]) -> list[int]:
        return list(source_of(tuple(prompt)))


class UncachedSourceMachine(SourceMachine):
    """Only completions of one call share."""

    enable_prefix_caching = False


@pytest.mark.parametrize("machine", [SourceMachine, UncachedSourceMachine])
def test_random_steps(machine: type[PriorityMachine]) -> None:
    run_machine(machine, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [SourceMachine, UncachedSourceMachine])
def test_many_random_steps(machine: type[PriorityMachine]) -> None:
    run_machine(machine, NIGHTLY_STEPS)


def scheduler(num_blocks: int, **options: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 32, "block_size": 4,
        "enable_prefix_caching": True, "enable_chunked_prefill": True,
        "policy": FirstComeFirstServed(), **options,
    }  # fmt: skip
    return Scheduler(num_blocks=num_blocks, **settings, parts=parts_for(max_source_tokens=16))


def request(source: list[int], max_tokens: int = 8) -> Request:
    spec = RequestSpec(
        request_id="caller's", prompt_token_ids=[1, 2], params=SamplingParams(),
        max_tokens=max_tokens, source=Source(source),
    )  # fmt: skip
    return spec.requests()[0]


def encoded(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [len(item.source.token_ids) for item in encoded_by(plan)]


def test_a_plan_encodes_up_to_its_budget_and_others_wait() -> None:
    planner = scheduler(64)
    planner.add_requests(*(request(list(range(n))) for n in (9, 8, 3, 16)))
    # 16 at most: one longest source, which is more than the budget of tokens.
    assert [encoded(planner.schedule()) for _ in range(3)] == [[9], [8, 3], [16]]


def test_equal_sources_are_encoded_once() -> None:
    planner = scheduler(64)
    planner.add_requests(*(request([3, 4, 5, 6, 7]) for _ in range(2)), request([3, 4, 5, 6]))
    plan = planner.schedule()
    assert encoded(plan) == [5, 4]
    first, second, third = (w.block_ids for w in plan.table_writes if w.group == 1)
    assert first == second == encoded_by(plan)[0].block_ids
    assert not set(first) & set(third)
    planner.check_invariants()


def test_without_prefix_caching_only_completions_of_one_request_share_a_source() -> None:
    planner = scheduler(64, enable_prefix_caching=False)
    spec = RequestSpec(
        request_id="caller's", prompt_token_ids=[1, 2], params=SamplingParams(n=2), max_tokens=8,
        source=Source([3, 4, 5, 6, 7]),
    )  # fmt: skip
    planner.add_requests(*spec.requests())
    for _ in range(2):
        planner.add_requests(request([3, 4, 5, 6, 7]))
    encoded_tokens, blocks = [], []
    while (plan := planner.schedule()) is not None:
        encoded_tokens += encoded(plan)
        blocks += [tuple(w.block_ids) for w in plan.table_writes if w.group == 1]
        counts = [int(sampled) for sampled in plan.samples]
        planner.update(plan, StepResult(plan.step, counts, [50] * sum(counts)))
    assert encoded_tokens == [5, 5, 5]
    assert len(set(blocks)) == 3 and len(blocks) == 4
    planner.check_invariants()


def test_a_request_waits_for_blocks_of_its_source() -> None:
    """7 blocks: the second request needs 4 and 1, of which 2 are there when the first has 4 and
    1."""
    planner = scheduler(8, max_num_batched_tokens=16, max_num_seqs=2)
    one, two = request(list(range(16)), 2), request(list(range(1, 17)), 2)
    planner.add_requests(one, two)
    assert encoded(planner.schedule()) == [16]
    assert planner.num_waiting == 1
    planner.finish_request(one.request_id, "abort")
    assert encoded(planner.schedule()) == [16]
    assert planner.num_waiting == 0


def test_the_source_of_a_failed_request_is_not_found_again() -> None:
    planner = scheduler(64)
    planner.add_requests(request([3, 4, 5]))
    plan = planner.schedule()
    assert plan is not None and encoded(plan) == [3]
    result = StepResult(step=plan.step, counts=[0], token_ids=[], failed={0: "NaN"})
    assert planner.update(plan, result)[0].error == "NaN"
    planner.add_requests(request([3, 4, 5]))
    assert encoded(planner.schedule()) == [3]


def test_a_cached_prefix_belongs_to_its_source() -> None:
    planner = scheduler(64)
    hits = []
    for source in ([3, 4], [3, 5], [3, 4]):
        spec = RequestSpec(
            request_id="caller's", prompt_token_ids=list(range(1, 8)), params=SamplingParams(),
            max_tokens=1, source=Source(source),
        )  # fmt: skip
        [one] = spec.requests()
        planner.add_requests(one)
        plan = planner.schedule()
        assert plan is not None
        planner.update(plan, StepResult(step=plan.step, counts=[1], token_ids=[9]))
        hits.append(one.num_cached_tokens)
    assert hits == [0, 0, 4]

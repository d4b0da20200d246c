"""Requests go where their prefix is known, unless another member has that much less to do."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jackfield.core.data_parallel.restarts import (
    LONGEST_PAUSE,
    MAX_RESTARTS,
    STEADY_SECONDS,
    RestartPolicy,
)
from jackfield.core.data_parallel.router import EXPECTED_TOKENS, Placement, Router
from jackfield.core.request import RequestSpec
from jackfield.core.sampling_params import SamplingParams

CACHE_TOKENS = 64 * 40


def router(num_members: int = 2, **options: Any) -> Router:
    created = Router(num_members, 16, **{"finds_prefixes": True, **options})
    for member in range(num_members):
        created.begin_member(member, CACHE_TOKENS)
    return created


def spec(prompt: list[int], max_tokens: int = 10, n: int = 1, **fields: Any) -> RequestSpec:
    return RequestSpec(
        request_id="r", prompt_token_ids=prompt, params=SamplingParams(n=n), max_tokens=max_tokens,
        **fields,
    )  # fmt: skip


def text(seed: int, length: int = 300) -> list[int]:
    return [seed * 1000 + position for position in range(length)]


def test_equal_members_take_turns() -> None:
    chooser = router(3)
    placed = [chooser.place(spec(text(number)), [0, 1, 2]).member for number in range(9)]
    assert placed == [0, 1, 2] * 3


def test_a_known_prefix_decides_between_idle_members() -> None:
    chooser = router()
    first = chooser.place(spec(text(1)), [0, 1])
    chooser.release(first)
    other = chooser.place(spec(text(2)), [0, 1])
    chooser.release(other)
    assert {first.member, other.member} == {0, 1}
    for _ in range(3):
        longer = chooser.place(spec([*text(1), *text(9, 100)]), [0, 1])
        chooser.release(longer)
        assert longer.member == first.member
        assert longer.num_known_tokens >= 256
    assert chooser.loads == [0, 0]


def test_the_longest_of_several_known_prefixes_decides() -> None:
    chooser = router()
    chooser.release(chooser.place(spec(text(1)[:130]), [0]))
    chooser.release(chooser.place(spec(text(1)[:260]), [1]))
    placement = chooser.place(spec(text(1)), [0, 1])
    assert (placement.member, placement.num_known_tokens) == (1, 256)


def test_load_decides_once_it_costs_more_than_the_prefix_saves() -> None:
    chooser = router()
    members = []
    for _ in range(8):
        placement = chooser.place(spec(text(1), max_tokens=100), [0, 1])
        chooser.begin(placement)
        members.append(placement.member)
    # A fourth request of 100 tokens would wait for 300, more than the 256 known ones save: it goes
    # to the other member, which then knows them, too.
    assert members == [0, 0, 0, 1, 1, 1, 0, 1]
    assert chooser.loads == [400, 400]


def test_salts_keep_prefixes_apart_and_some_requests_read_none() -> None:
    chooser = router()
    chooser.release(chooser.place(spec(text(1), cache_salt="a"), [0]))
    assert chooser.place(spec(text(1), cache_salt="b"), [0]).num_known_tokens == 0
    assert chooser.place(spec(text(1), cache_salt="a"), [0]).num_known_tokens == 256
    assert (
        chooser.place(spec(text(1), cache_salt="a", reads_cache=False), [0]).num_known_tokens == 0
    )
    without = router(finds_prefixes=False)
    without.place(spec(text(1)), [0])
    assert without.place(spec(text(1)), [0]).num_known_tokens == 0


def test_a_prompt_of_whole_chunks_is_not_known_to_its_last_token() -> None:
    chooser = router()
    chooser.place(spec(text(1, 128)), [0])
    assert chooser.place(spec(text(1, 128)), [0]).num_known_tokens == 64


def test_no_more_prefixes_are_remembered_than_a_cache_holds() -> None:
    chooser = router(1)
    for seed in range(20):
        chooser.place(spec(text(seed)), [0])
    assert len(chooser._prefixes[0]) == CACHE_TOKENS // 64
    assert chooser.place(spec(text(19)), [0]).num_known_tokens == 256
    assert chooser.place(spec(text(0)), [0]).num_known_tokens == 0


class Traffic(RuleBasedStateMachine):
    """Loads are exactly those of the requests that have not ended, whatever members come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.router = router(3)
        self.up = {0, 1, 2}
        self.live: list[tuple[Placement, RequestSpec]] = []

    @rule(
        seed=st.integers(0, 3), length=st.integers(1, 400), n=st.integers(1, 3),
        max_tokens=st.sampled_from([1, 50, 5000]), cached=st.booleans(),
    )  # fmt: skip
    def place(self, seed: int, length: int, n: int, max_tokens: int, cached: bool) -> None:
        if not self.up:
            return
        request = spec(text(seed, length), max_tokens, n, reads_cache=cached)
        placement = self.router.place(request, sorted(self.up))
        assert placement.member in self.up
        assert 0 <= placement.num_known_tokens < length
        expected = n * min(max_tokens, EXPECTED_TOKENS)
        assert placement.prompt_cost == length - placement.num_known_tokens
        assert placement.output_cost == expected
        self.live.append((placement, request))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.live:
            number = data.draw(st.integers(0, len(self.live) - 1))
            self.router.release(self.live.pop(number)[0])

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        if self.live:
            self.router.begin(data.draw(st.sampled_from(self.live))[0])

    @rule(member=st.integers(0, 2))
    def lose(self, member: int) -> None:
        self.up.discard(member)
        for placement, _ in [each for each in self.live if each[0].member == member]:
            self.router.release(placement)
        self.live = [each for each in self.live if each[0].member != member]
        assert self.router.loads[member] == 0

    @rule(member=st.integers(0, 2))
    def start(self, member: int) -> None:
        if member not in self.up:
            self.up.add(member)
            self.router.begin_member(member, CACHE_TOKENS)

    @rule()
    def reset(self) -> None:
        self.router.forget_prefixes()
        assert not any(self.router._prefixes)

    @invariant()
    def counts_are_those_of_live_requests(self) -> None:
        for member in range(3):
            costs = [p.prompt_cost + p.output_cost for p, _ in self.live if p.member == member]
            assert self.router.loads[member] == sum(costs) >= 0
            assert self.router.num_requests[member] == len(costs)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_pauses_grow_and_end() -> None:
    policy = RestartPolicy()
    pauses = [policy.pause(1.0) for _ in range(MAX_RESTARTS)]
    assert pauses[:3] == [0.5, 1.0, 2.0] and max(filter(None, pauses)) == LONGEST_PAUSE
    assert policy.pause(0.0) is None
    sound = RestartPolicy()
    for _ in range(MAX_RESTARTS + 3):
        assert sound.pause(STEADY_SECONDS) == 0.5

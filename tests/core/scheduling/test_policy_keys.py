"""Schedule policies that fail: their own request is refused, and nothing is left of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackfield.core.errors import RequestFailed
from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.queues.queue import RequestQueue
from jackfield.core.scheduling.scheduler import Scheduler


class ByPrompt:
    """The key is what a table says for the prompt's first token."""

    def __init__(self, keys: dict[int, Any]) -> None:
        self.keys = keys

    def key(self, request: Request) -> Any:
        key = self.keys[request.prompt_token_ids[0]]
        if isinstance(key, Exception):
            raise key
        return key


def scheduler_with(keys: dict[int, Any]) -> Scheduler:
    return Scheduler(
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=32,
        num_blocks=40,
        block_size=4,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        policy=ByPrompt(keys),
        policy_name="schedule policy 'shortest' of acme 1.0",
    )


def request(name: str, token: int, leader: Request | None = None) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[token] * 5,
        params=SamplingParams(max_tokens=4),
        max_tokens=4,
        seed=0,
        leader=leader,
    )


WRONG = [
    ValueError("on purpose"),
    None,
    5,
    [1],
    "text",
    (None,),
    (float("nan"),),
    ({"a": 1},),
    (object(),),
    ((1, [2]),),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda key: str(key).partition(" at 0x")[0])
def test_a_policy_that_fails_refuses_its_request_by_name_and_leaves_nothing(wrong: Any) -> None:
    scheduler = scheduler_with({1: (1.0,), 2: wrong})
    scheduler.add_requests(request("first", 1))
    with pytest.raises(RequestFailed, match=r"'shortest' of acme 1\.0"):
        scheduler.add_requests(request("second", 2))
    assert set(scheduler.requests.by_id) == {"first"}
    assert scheduler.finish_request("second", "abort") is None
    scheduler.check_invariants()
    assert [r.request_id for r in scheduler.requests.waiting] == ["first"]


@pytest.mark.parametrize("wrong", [("a",), (1, 2), (), ((1,),), (b"a",)], ids=repr)
def test_a_key_that_cannot_be_compared_with_those_before_is_refused(wrong: Any) -> None:
    scheduler = scheduler_with({1: (1.0,), 2: wrong})
    scheduler.add_requests(request("first", 1))
    assert scheduler.schedule() is not None  # It runs: the queue in which the other one would wait
    with pytest.raises(RequestFailed, match="cannot be compared"):  # is empty.
        scheduler.add_requests(request("second", 2))
    scheduler.check_invariants()
    scheduler.finish_request("first", "abort")
    scheduler.add_requests(request("second", 2))  # Alone, there is nothing to compare it with.
    scheduler.check_invariants()


def test_numbers_of_any_size_are_keys() -> None:
    scheduler = scheduler_with({1: (10**400,), 2: (float("inf"),), 3: (-(10**400),), 4: (True,)})
    for token in (1, 2, 3, 4):
        scheduler.add_requests(request(f"r{token}", token))
    scheduler.check_invariants()
    assert [r.request_id for r in scheduler.requests.waiting] == ["r3", "r4", "r1", "r2"]


def test_siblings_are_added_together_or_not_at_all() -> None:
    names: list[str] = []

    class Third:
        def key(self, request: Request) -> Any:
            names.append(request.request_id)
            if len(names) == 3:
                raise KeyError("on purpose")
            return (1,)

    scheduler = scheduler_with({})
    scheduler._keys._policy = Third()
    leader = request("a", 1)
    siblings = [leader, *(request(name, 1, leader) for name in "bc")]
    with pytest.raises(RequestFailed, match="KeyError"):
        scheduler.add_requests(*siblings)
    assert names == ["a", "b", "c"]
    assert (
        not scheduler.requests.by_id
        and not scheduler.has_work
        and len(scheduler.requests.waiting) == 0
    )


def ordered(name: str, order: tuple[Any, ...]) -> Request:
    queued = request(name, 1)
    queued.order = order
    return queued


orders = st.lists(st.tuples(st.integers(0, 3)), min_size=0, max_size=8)


@given(orders, st.tuples(st.integers(-1, 4)) | st.just(()))
def test_a_queue_removes_what_was_named_and_nothing_else(
    keys: list[tuple[int]], stranger: tuple[int, ...]
) -> None:
    queue = RequestQueue()
    members = [ordered(str(i), (*key, i)) for i, key in enumerate(keys)]
    for member in members:
        queue.add(member)
    before = list(queue)
    for order in (stranger, *(member.order for member in members)):
        with pytest.raises(ValueError, match="not in this queue"):
            queue.remove(ordered("stranger", order))
        assert list(queue) == before
    for member in members:
        before.remove(member)
        queue.remove(member)
        assert list(queue) == before


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.data(),
)
def test_abort_touches_only_the_request_it_names_whatever_the_policy_says(
    tokens: list[int], data: st.DataObject
) -> None:
    """Token 3's policy fails, token 2's key is of another shape."""
    scheduler = scheduler_with({0: (0,), 1: (1.5,), 2: ("x",), 3: ZeroDivisionError("no")})
    live: set[str] = set()
    for index, token in enumerate(tokens):
        name = f"r{index}"
        try:
            scheduler.add_requests(request(name, token))
            live.add(name)
        except RequestFailed:
            pass
        if data.draw(st.booleans()):
            scheduler.schedule()
        if data.draw(st.booleans()):
            name = f"r{data.draw(st.integers(0, len(tokens)))}"
            ended = scheduler.finish_request(name, "abort")
            assert (ended is not None) == (name in live)
            live.discard(name)
        assert set(scheduler.requests.by_id) == live
        scheduler.check_invariants()
    for name in sorted(live):
        assert scheduler.finish_request(name, "abort") is not None
    assert scheduler.kv.num_used_blocks == 0 and not scheduler.has_work

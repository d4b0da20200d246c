"""`SchedulePolicyKit`: whether a schedule policy gives all requests a total order.

    class TestMine(SchedulePolicyKit):
        name = "mine"                               # as registered
        expected_order = [                          # who goes first, as you mean it
            {"prompt_token_ids": [5] * 2}, {"prompt_token_ids": [5] * 9},
        ]

The kit does not judge the order: the policy defines it.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.pooling_params import PoolingParams
from ...core.protocols.executors import SchedulePolicy
from ...core.request import Request
from ...core.sampling_params import OutputKind, SamplingParams, StructuredOutputsParams
from ...core.scheduling.policy_keys import PolicyKeys
from ...core.scheduling.scheduler import Scheduler
from ...core.step import StepResult
from .clock import GROWTH_ATTEMPTS, growth
from .kit import Kit

NUM_BLOCKS = 12
BLOCK = 4
LONGEST = 40
FIRST, POLICIES = 10, 40
"""Keys of a new policy that are timed, and of how many policies together: for one alone, a cache
that is cold takes as long as they do."""
BAR = 20.0
"""Allowed ratio of the time of a key after some thousand requests to the time before them."""
STUCK_SECONDS = 60.0
"""Longer than any operation here takes; what takes longer hangs."""


def make_request(number: int = 0, **fields: Any) -> Request:
    """Create a request with the defaults of a short completion."""
    settings: dict[str, Any] = {
        "request_id": f"request-{number}",
        "prompt_token_ids": [5, 6, 7],
        "params": SamplingParams(),
        "max_tokens": 4,
        "seed": 0,
        "arrival": 1000.0 + number,
        **fields,
    }
    return Request(**settings)


def assorted() -> list[Request]:
    """Return requests of all kinds that the scheduler may pass."""
    leader = make_request(0)
    fields: list[Mapping[str, Any]] = [
        {},
        {"arrival": 1000.0},
        {"priority": -(2**31)},
        {"priority": 2**31},
        {"priority": 3, "arrival": 0.0},
        {"prompt_token_ids": [9]},
        {"prompt_token_ids": [9] * 5000, "max_tokens": 10_000},
        {"cache_salt": "tenant", "cache_extra": ("adapter", 3)},
        {"leader": leader, "params": SamplingParams(n=3)},
        {"params": SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=1)},
        {"params": SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))},
        {"params": SamplingParams(kv_transfer_params={"from": "elsewhere"})},
        {"pooling": PoolingParams(task="embed"), "max_tokens": 1},
        {"pooling": PoolingParams(), "max_tokens": 1, "token_type_ids": (0, 0, 1)},
        {"eos_token_ids": frozenset({1, 2}), "bad_words_token_ids": ((3, 4),)},
        {"request_id": "üñï🙂", "reads_cache": False},
    ]
    return [leader, *(make_request(number, **options) for number, options in enumerate(fields, 1))]


class SchedulePolicyKit(Kit):
    """Subclass it, and set the order."""

    kind = "schedule_policy"
    expected_order: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Fields of requests (`core.scheduling.request.Request`), those that go first first. They are
    added in the opposite order."""

    def make(self) -> SchedulePolicy:
        """Create the policy as the engine does."""
        policy: SchedulePolicy = self.registered()()
        return policy

    def key(self, policy: SchedulePolicy, request: Request) -> tuple[Any, ...]:
        """Return the policy's key, as a tuple."""
        key = policy.key(request)
        assert isinstance(key, tuple), f"key() gives {key!r}, no tuple"
        return key

    # ------------------------------------------------------------ keys

    def test_every_request_gets_a_tuple(self) -> None:
        policy = self.make()
        for request in assorted():
            self.key(policy, request)

    def test_keys_order_all_requests(self) -> None:
        """Keys have one shape, so that any two compare, and no three form a cycle."""
        policy_keys = PolicyKeys(self.make(), self.name)
        keys = [
            policy_keys.of(request, alone=number == 0) for number, request in enumerate(assorted())
        ]
        for a, b in itertools.product(keys, repeat=2):
            facts = (a < b, a == b, b < a)
            assert facts.count(True) == 1, f"{a!r} and {b!r}: neither before, nor equal"
        for a, b, c in itertools.product(keys, repeat=3):
            assert not (a < b and b < c) or a < c, f"{a!r} < {b!r} < {c!r}"

    def test_a_request_is_read_and_not_changed(self) -> None:
        policy = self.make()
        for request in assorted():
            before = {
                k: v if isinstance(v, Request) else copy.copy(v) for k, v in vars(request).items()
            }
            self.key(policy, request)
            assert vars(request) == before

    def test_a_key_costs_the_same_however_many_came_before(self) -> None:
        """A key that scans all earlier requests stops the server when many wait."""
        many = self.make()
        for number in range(5_000):
            many.key(make_request(number))
        earlier = [make_request(number) for number in range(FIRST)]
        later = [make_request(5_000 + number) for number in range(FIRST * POLICIES)]
        fresh = iter([self.make() for _ in range(GROWTH_ATTEMPTS * 2 * POLICIES)])

        def first_keys() -> None:
            """Ask new policies: what one keeps would grow from one attempt to the next."""
            for policy in itertools.islice(fresh, POLICIES):
                for request in earlier:
                    policy.key(request)

        ratio = growth(first_keys, lambda: [many.key(request) for request in later], bar=BAR)
        assert ratio < BAR, f"after 5,000 requests a key takes {ratio:.0f} times as long"

    def test_the_order_is_the_one_that_is_meant(self) -> None:
        if not self.expected_order:
            pytest.skip("the kit was told of no order: give it expected_order")
        policy = self.make()
        count = len(self.expected_order)
        requests = [make_request(n, **fields) for n, fields in enumerate(self.expected_order)]
        keys = {}
        for number in reversed(range(count)):
            if "arrival" not in self.expected_order[number]:
                requests[number].arrival = 1000.0 + count - number
            keys[number] = self.key(policy, requests[number])
        assert sorted(keys, key=lambda number: keys[number]) == list(range(count)), keys

    # ------------------------------------------------------------ under a scheduler

    @pytest.mark.parametrize("seed", range(3))
    def test_every_request_comes_to_its_end(self, seed: int) -> None:
        """Run the real scheduler, with a small cache, preemptions, aborts and late arrivals.

        The scheduler's state is checked after every step.
        """
        draw = random.Random(seed)
        scheduler = Scheduler(
            max_num_seqs=3, max_num_batched_tokens=16, max_model_len=LONGEST,
            num_blocks=NUM_BLOCKS, block_size=BLOCK, enable_prefix_caching=True,
            enable_chunked_prefill=True, policy=self.make(),
        )  # fmt: skip
        waiting = [
            make_request(
                number,
                prompt_token_ids=[draw.randrange(50) for _ in range(draw.randint(1, 20))],
                max_tokens=draw.randint(1, 12),
                priority=draw.randint(-2, 2),
            )
            for number in range(40)
        ]
        aborted, ended, steps = set(), set(), 0
        while waiting or scheduler.requests.by_id:
            steps += 1
            assert steps < 5000, "requests are left over that are never scheduled"
            for _ in range(min(len(waiting), draw.randint(0, 3))):
                scheduler.add_requests(waiting.pop())
            if scheduler.requests.by_id and draw.random() < 0.05:
                victim = draw.choice(sorted(scheduler.requests.by_id))
                assert scheduler.finish_request(victim, "abort") is not None
                assert victim not in scheduler.requests.by_id, "another one was removed"
                aborted.add(victim)
            plan = scheduler.schedule()
            if plan is None:
                continue
            tokens = [draw.randrange(50) for sampled in plan.samples if sampled]
            result = StepResult(plan.step, list(map(int, plan.samples)), tokens)
            for update in scheduler.update(plan, result):
                assert update.error is None, update.error
                if update.finished:
                    ended.add(update.request.request_id)
            scheduler.check_invariants()
        assert ended | aborted == {f"request-{number}" for number in range(40)}
        assert not ended & aborted

    def test_an_engine_serves_with_it(self) -> None:
        """Tokens equal those in order of arrival, for any order and any preemptions."""
        rng = random.Random(5)
        prompts = [[rng.randrange(10, 1000) for _ in range(n)] for n in (2, 30, 9, 17, 5, 24)]

        async def serve(policy: str, blocks: int) -> list[list[int]]:
            config = EngineConfig(
                device="cpu", dtype="float32", scheduling_policy=policy, block_size=4,
                max_model_len=64, max_num_seqs=3, num_gpu_blocks_override=blocks,
            )  # fmt: skip
            params = SamplingParams(
                temperature=0.0, max_tokens=8, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
            )

            async def generate(number: int) -> list[int]:
                stream = engine.generate(prompts[number], params, priority=number % 3 - 1)
                return [output.outputs[0].token_ids async for output in stream][-1]

            async with AsyncEngine(config, plugins=self.plugins()) as engine:
                return list(await asyncio.gather(*map(generate, range(len(prompts)))))

        async def compare() -> None:
            alone = await serve("fcfs", 200)
            assert await asyncio.wait_for(serve(self.name, 18), STUCK_SECONDS) == alone

        asyncio.run(compare())

"""Random traffic against a worker that keeps, for each cache position, the tokens it stands for."""

from __future__ import annotations

from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jackfield.core.scheduling.request import Request
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.types import SamplingParams, StepPlan, StepResult
from jackfield.plugins.policies.builtin import FirstComeFirstServed, Priority

EOS = 9


def next_token(prefix: tuple[int, ...], salt: str | None) -> int:
    """The model: what follows depends on every token before it, and on whose cache it reads."""
    return hash((prefix, salt is None)) % 10


class ReplayingWorker:
    """Applies plans as a worker does, in order, and refuses any that break the contract.

    The KV of a position is the pair (tokens up to and including it, salt): what real KV depends
    on, and who may read it.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, budget: int) -> None:
        self.block_size, self.max_num_seqs, self.budget = block_size, max_num_seqs, budget
        self.num_blocks = num_blocks
        self.kv: dict[tuple[int, int], tuple[tuple[int, ...], str | None]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.salts: dict[int, str | None] = {}

    def run(self, plan: StepPlan, salts: dict[str, str | None]) -> StepResult:
        for slot in plan.released:
            for state in (self.tokens, self.computed, self.tables, self.salts):
                del state[slot]
        for start in plan.starts:
            assert start.slot not in self.tables, "a slot is used twice"
            assert 0 <= start.slot < self.max_num_seqs
            self.tokens[start.slot] = list(start.token_ids)
            self.computed[start.slot] = start.num_computed_tokens
            self.tables[start.slot] = list(start.block_ids)
            self.salts[start.slot] = salts[start.request_id]
        for slot, blocks in plan.appended_blocks:
            self.tables[slot].extend(blocks)

        assert plan.slots and len(set(plan.slots)) == len(plan.slots)
        assert len(plan.slots) == len(plan.num_tokens) == len(plan.samples)
        assert plan.total_tokens <= self.budget
        started = {start.slot for start in plan.starts}
        is_prefill = [
            not (count == 1 and sampled and slot not in started)
            for slot, count, sampled in zip(plan.slots, plan.num_tokens, plan.samples, strict=True)
        ]
        assert is_prefill == sorted(is_prefill), "a decode row after a prefill row"
        written: set[tuple[int, int]] = set()
        for slot, count in zip(plan.slots, plan.num_tokens, strict=True):
            assert count >= 1
            for position in range(self.computed[slot], self.computed[slot] + count):
                place = self._place(slot, position)
                assert place not in written, "two rows write one place"
                written.add(place)
                prefix = tuple(self.tokens[slot][: position + 1])
                assert len(prefix) == position + 1, "computes a token that does not exist"
                self.kv[place] = (prefix, self.salts[slot])
        sampled_ids = []
        rows = zip(plan.slots, plan.num_tokens, plan.samples, strict=True)
        for slot, count, sampled in rows:
            self.computed[slot] += count
            end = self.computed[slot]
            assert sampled == (end == len(self.tokens[slot])), "samples off the end"
            for position in range(end):
                prefix, salt = self.kv[self._place(slot, position)]
                assert prefix == tuple(self.tokens[slot][: position + 1]), "another's KV"
                assert salt == self.salts[slot], "another tenant's KV"
            token = -1
            if sampled:
                prefix, salt = self.kv[self._place(slot, end - 1)]
                token = next_token(prefix, salt)
                self.tokens[slot].append(token)
            sampled_ids.append(token)
        return StepResult(plan.step, sampled_ids)

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        block = self.tables[slot][position // self.block_size]
        assert 0 < block < self.num_blocks
        return block, position % self.block_size


def expected_output(request: Request, salt: str | None, max_model_len: int) -> list[int]:
    """The request alone, by definition: no scheduler, no cache."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    while len(output) < request.max_tokens and len(tokens) < max_model_len:
        output.append(next_token(tuple(tokens), salt))
        tokens.append(output[-1])
        stops = request.eos_token_ids.union(request.params.stop_token_ids)
        if output[-1] in stops and len(output) >= request.params.min_tokens:
            break
    return output


class SchedulerMachine(RuleBasedStateMachine):
    """add / schedule / update / finish in any order, up to two steps in flight."""

    enable_prefix_caching = True
    enable_chunked_prefill = True
    policy: type = FirstComeFirstServed
    max_num_seqs, budget, max_model_len, num_blocks, block_size = 4, 16, 40, 14, 4

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.policy(),
        )
        self.worker = ReplayingWorker(
            self.num_blocks, self.block_size, self.max_num_seqs, self.budget
        )
        self.flying: deque[tuple[StepPlan, StepResult]] = deque()
        self.all: dict[str, Request] = {}
        self.salts: dict[str, str | None] = {}
        self.received: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.aborted: set[str] = set()
        self.failed: set[str] = set()

    @rule(
        start=st.integers(0, 2),
        length=st.integers(1, 30),
        tail=st.lists(st.integers(0, 3), max_size=3),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 3),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "tenant"]),
        siblings=st.sampled_from([0, 0, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        stop_ids=st.sampled_from([(), (), (3,)]),
    )
    def add(
        self,
        start,
        length,
        tail,
        max_tokens,
        min_tokens,
        priority,
        salt,
        siblings,
        prompt_logprobs,
        stop_ids,
    ):
        prompt = [(start + i) % 7 for i in range(length)] + tail
        leader = None
        for _ in range(1 + siblings):
            request = Request(
                request_id=str(len(self.all)),
                prompt_token_ids=list(prompt),
                params=SamplingParams(
                    max_tokens=max_tokens,
                    min_tokens=min(min_tokens, max_tokens),
                    prompt_logprobs=prompt_logprobs,
                    stop_token_ids=stop_ids,
                ),
                max_tokens=max_tokens,
                seed=0,
                eos_token_ids=frozenset({EOS}),
                priority=priority,
                cache_salt=salt,
                arrival=float(len(self.all)),
                leader=leader,
            )
            leader = leader or request
            self.all[request.request_id] = request
            self.salts[request.request_id] = salt
            self.received[request.request_id] = []
            fits = self.scheduler.fits(request)
            self.scheduler.add(request)
            assert request.finished != fits

    @rule()
    def schedule(self):
        if len(self.flying) < 2:
            plan = self.scheduler.schedule()
            if plan is not None:
                self.flying.append((plan, self.worker.run(plan, self.salts)))

    @precondition(lambda self: self.flying)
    @rule()
    def update(self):
        self.take(self.scheduler.update(*self.flying.popleft()))

    def take(self, updates):
        for update in updates:
            request_id = update.request.request_id
            assert request_id not in self.ended, "heard from after the end"
            self.received[request_id] += update.new_token_ids
            if update.finished:
                self.ended.add(request_id)
            if update.error is not None:
                self.failed.add(request_id)

    @rule(data=st.data())
    def abort(self, data):
        live = sorted(self.scheduler.requests)
        if live:
            request_id = data.draw(st.sampled_from(live))
            assert self.scheduler.finish(request_id, "abort") is self.all[request_id]
            assert self.scheduler.finish(request_id, "abort") is None
            self.aborted.add(request_id)
            self.ended.add(request_id)

    @rule()
    def reset_prefix_cache(self):
        assert self.scheduler.reset_prefix_cache() == (self.scheduler.num_running == 0)

    @invariant()
    def books_balance(self):
        self.scheduler.check_invariants()
        assert self.scheduler.in_flight == len(self.flying)
        assert self.scheduler.num_running <= self.max_num_seqs

    def teardown(self):
        for _ in range(5000):
            if not self.scheduler.has_work and not self.flying:
                break
            in_flight = len(self.flying)
            self.schedule()
            if len(self.flying) in (in_flight, 2):
                if self.flying:
                    self.update()
                else:
                    self.take(self.scheduler.take_failures())
            self.scheduler.check_invariants()
        assert not self.scheduler.has_work, "somebody never finishes"
        assert self.ended == set(self.all)
        assert self.scheduler.kv.num_used_blocks == 0
        for request_id, request in self.all.items():
            expected = expected_output(request, self.salts[request_id], self.max_model_len)
            received = self.received[request_id]
            assert received == request.output_token_ids
            if request_id in self.failed:
                assert not received
            elif request_id in self.aborted:
                assert received == expected[: len(received)]
            else:
                assert received == expected
                assert request.finish_reason in ("stop", "length")


class PriorityMachine(SchedulerMachine):
    policy = Priority


class NoCacheNoChunkMachine(SchedulerMachine):
    enable_prefix_caching = False
    enable_chunked_prefill = False
    budget = 24


class OneTokenBlocksMachine(SchedulerMachine):
    block_size = 1
    num_blocks = 42


for machine in (SchedulerMachine, PriorityMachine, NoCacheNoChunkMachine, OneTokenBlocksMachine):
    machine.TestCase.settings = settings(
        max_examples=60,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

TestScheduler = SchedulerMachine.TestCase
TestPriority = PriorityMachine.TestCase
TestNoCacheNoChunk = NoCacheNoChunkMachine.TestCase
TestOneTokenBlocks = OneTokenBlocksMachine.TestCase

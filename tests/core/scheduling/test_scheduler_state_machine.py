"""Random traffic against a worker that keeps, for each cache position, the tokens it stands for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jackfield.core.scheduling.request import Request, Status
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.types import KVReport, SamplingParams, StepPlan, StepResult
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

    def forget(self) -> None:
        """What the executor's `recover` does; blocks may hold anything by now."""
        for state in (self.tokens, self.computed, self.tables, self.salts, self.kv):
            state.clear()

    def run(
        self, plan: StepPlan, salts: dict[str, str | None], report: KVReport | None = None
    ) -> StepResult:
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

        assert plan.slots or plan.kv_metadata is not None or report is not None
        assert len(set(plan.slots)) == len(plan.slots)
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
        return StepResult(plan.step, sampled_ids, kv_report=report)

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

    connector: FarSide | None = None

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
            connector=self.connector,
            hash_key=b"the same for all",
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
        self.slots: dict[int, str] = {}
        self.owners: dict[int, dict[int, str]] = {}
        """Step → slot → the request that has it."""
        self.failed_later: set[str] = set()
        """Ended by a step that failed, after what they had received until then."""

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
        self.add_one(
            [(start + i) % 7 for i in range(length)] + tail,
            SamplingParams(
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                prompt_logprobs=prompt_logprobs,
                stop_token_ids=stop_ids,
            ),
            priority,
            salt,
            siblings,
        )

    def add_one(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        salt: str | None = None,
        siblings: int = 0,
    ) -> None:
        leader = None
        for _ in range(1 + siblings):
            assert params.max_tokens is not None
            request = Request(
                request_id=str(len(self.all)),
                prompt_token_ids=list(prompt),
                params=params,
                max_tokens=params.max_tokens,
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
                for start in plan.starts:
                    self.slots[start.slot] = start.request_id
                self.owners[plan.step] = dict(self.slots)
                report = self.transfer(plan)
                self.flying.append((plan, self.worker.run(plan, self.salts, report)))

    def transfer(self, plan: StepPlan) -> KVReport | None:
        """What the worker half of a connector does with a step."""
        return None

    @precondition(lambda self: self.flying)
    @rule()
    def update(self):
        self.take(self.scheduler.update(*self.flying.popleft()))

    @precondition(lambda self: self.flying and self.connector is None)
    @rule()
    def fail_step(self):
        """The oldest step in flight brings nothing, and those behind it are not run."""
        plan, _ = self.flying.popleft()
        self.flying.clear()
        self.worker.forget()
        had_part = {self.slot_owner(plan, slot) for slot in plan.slots}
        updates = self.scheduler.fail_step(plan, "on purpose")
        ended = {u.request.request_id for u in updates if u.error == "on purpose"}
        assert ended <= had_part, "a request without a part in the step was ended"
        self.failed_later |= ended
        self.take(updates)
        assert self.scheduler.num_running == 0

    def slot_owner(self, plan: StepPlan, slot: int) -> str:
        return self.owners[plan.step][slot]

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
            self.abort_one(data.draw(st.sampled_from(live)))

    def abort_one(self, request_id: str) -> None:
        assert self.scheduler.finish(request_id, "abort") is self.all[request_id]
        assert self.scheduler.finish(request_id, "abort") is None
        self.aborted.add(request_id)
        self.ended.add(request_id)

    def progress(self) -> None:
        """What else must happen for everything to end."""

    @rule()
    def reset_prefix_cache(self):
        unused = self.scheduler.num_running == 0 and not self.num_transfers
        assert self.scheduler.reset_prefix_cache() == unused

    @property
    def num_transfers(self) -> int:
        return 0 if self.scheduler.transfers is None else len(self.scheduler.transfers)

    @invariant()
    def books_balance(self):
        self.scheduler.check_invariants()
        assert self.scheduler.in_flight == len(self.flying)
        assert self.scheduler.num_running <= self.max_num_seqs

    def run_to_the_end(self) -> None:
        for _ in range(5000):
            if not self.scheduler.has_work and not self.flying and not self.num_transfers:
                break
            in_flight = len(self.flying)
            self.progress()
            self.schedule()
            if len(self.flying) in (in_flight, 2):
                if self.flying:
                    self.update()
                else:
                    self.take(self.scheduler.take_failures())
            self.scheduler.check_invariants()

    def teardown(self):
        self.run_to_the_end()
        assert not self.scheduler.has_work, "somebody never finishes"
        assert self.ended == set(self.all)
        assert self.scheduler.kv.num_used_blocks == 0
        for request_id, request in self.all.items():
            expected = expected_output(request, self.salts[request_id], self.max_model_len)
            received = self.received[request_id]
            assert received == request.output_token_ids
            if request_id in self.failed_later:
                assert received == expected[: len(received)]
            elif request_id in self.failed:
                assert not received
            elif request_id in self.aborted:
                assert received == expected[: len(received)]
            else:
                assert received == expected
                assert request.finish_reason in ("stop", "length")


@dataclass
class Job:
    """A transfer between the cache and the far side."""

    transfer: int
    block_ids: list[int]
    keys: list[bytes]
    content: list[list[Any]]
    """[len(block_ids)][block_size] of a save: what it must find in the blocks until it ends."""


class FarSide:
    """The scheduler half of a connector to a dictionary. What it knows, it may tell late."""

    def __init__(self) -> None:
        self.store: dict[bytes, list[Any]] = {}
        self.block_size = SchedulerMachine.block_size
        self.known: dict[str, bool] = {}
        """Request → whether its question may be answered."""
        self.loads: list[Job] = []
        self.saves: list[Job] = []
        self.holds: list[Job] = []
        self.saves_nothing = False

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        if not self.known.setdefault(request.request_id, len(self.known) % 2 == 0):
            return None
        assert num_computed_tokens % self.block_size == 0
        first = num_computed_tokens // self.block_size
        keys = list(takewhile(self.store.__contains__, request.block_hashes[first:]))
        return len(keys) * self.block_size + len(self.store) % self.block_size

    def start_load(self, transfer, request, keys, block_ids):
        assert request.status is Status.LOADING
        self.loads.append(Job(transfer, list(block_ids), list(keys), []))

    def start_save(self, transfer, request, keys, block_ids):
        if self.saves_nothing:
            return []
        self.saves.append(Job(transfer, list(block_ids), list(keys), []))
        return block_ids

    def request_finished(self, transfer, request):
        holds = len(request.block_ids) % 3 == 2
        if holds:
            self.holds.append(Job(transfer, list(request.block_ids), [], []))
        return holds, {"blocks": len(request.block_ids)}

    def build_metadata(self):
        jobs = self.loads, self.saves, self.holds
        self.loads, self.saves, self.holds = [], [], []
        return jobs if any(jobs) else None

    def update(self, report):
        pass


class ConnectorMachine(SchedulerMachine):
    """The same traffic with transfers that take any number of steps, and fail now and then.

    Blocks of a load are rubbish from its start to its end; blocks of a save must keep what they
    had when it started.
    """

    def __init__(self) -> None:
        self.connector = FarSide()
        self.connector.block_size = self.block_size
        super().__init__()
        self.open: list[tuple[str, Job]] = []
        self.finished: list[int] = []
        self.failures: dict[int, tuple[int, ...]] = {}
        for start in range(3):
            self.add_one([(start + i) % 7 for i in range(30)], SamplingParams(max_tokens=1))
        self.run_to_the_end()
        self.lose_all_cached_blocks()

    def transfer(self, plan: StepPlan) -> KVReport | None:
        assert self.connector is not None
        kv, size = self.worker.kv, self.block_size
        loads, saves, holds = plan.kv_metadata or ([], [], [])
        for job in loads:
            for block_id in job.block_ids:
                kv.update({(block_id, i): ((-1,), "rubbish") for i in range(size)})
            self.open.append(("load", job))
        for job in [*saves, *holds]:
            job.content = [[kv.get((b, i)) for i in range(size)] for b in job.block_ids]
            self.open.append(("save" if job.keys else "hold", job))
        if not self.finished and not self.failures:
            return None
        report = KVReport(finished=tuple(self.finished), failed=self.failures)
        self.finished, self.failures = [], {}
        return report

    @rule(number=st.integers(0, 100), share=st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0]))
    def end_a_transfer(self, number, share):
        """The far side is through with one, or fails in the middle."""
        if not self.open:
            return
        assert self.connector is not None and self.scheduler.transfers is not None
        kind, job = self.open.pop(number % len(self.open))
        kv, size = self.worker.kv, self.block_size
        filled = int(share * len(job.block_ids))
        if kind == "load":
            for block_id, key in list(zip(job.block_ids, job.keys, strict=True))[:filled]:
                content = self.connector.store[key]
                kv.update({(block_id, i): content[i] for i in range(size)})
        else:
            now = [[kv.get((b, i)) for i in range(size)] for b in job.block_ids]
            assert now == job.content, "written while it was read"
            self.connector.store.update(zip(job.keys, now, strict=False))
        if share == 1.0:
            self.finished.append(job.transfer)
        else:
            self.failures[job.transfer] = tuple(job.block_ids[filled:])
        self.scheduler.transfers.expect_report()

    @rule()
    def answer(self):
        """The far side's answers have come: the engine would be woken."""
        assert self.connector is not None
        self.connector.known.update(dict.fromkeys(self.connector.known, True))

    @rule()
    def lose_all_cached_blocks(self):
        """So that there is something to load."""
        self.scheduler.kv.pool.forget_all()

    @rule(number=st.integers(0, 100))
    def abort_a_load(self, number):
        loading = self.scheduler.loading.requests
        if loading:
            self.abort_one(loading[number % len(loading)].request_id)

    def progress(self):
        self.answer()
        if self.open:
            self.end_a_transfer(0, (1.0, 0.5, 1.0, 0.0)[self.open[0][1].transfer % 4])


class PriorityMachine(SchedulerMachine):
    policy = Priority


class NoCacheNoChunkMachine(SchedulerMachine):
    enable_prefix_caching = False
    enable_chunked_prefill = False
    budget = 24


class OneTokenBlocksMachine(SchedulerMachine):
    block_size = 1
    num_blocks = 42


class ConnectorPriorityMachine(ConnectorMachine):
    policy = Priority
    num_blocks = 40


for machine in (
    SchedulerMachine,
    PriorityMachine,
    NoCacheNoChunkMachine,
    OneTokenBlocksMachine,
    ConnectorMachine,
    ConnectorPriorityMachine,
):
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
TestConnector = ConnectorMachine.TestCase
TestConnectorPriority = ConnectorPriorityMachine.TestCase

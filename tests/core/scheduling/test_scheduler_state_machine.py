"""Random traffic against a worker that keeps, for each cache position, the tokens it stands for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine as conjecture
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduled import compactions_of, drafted, drafts_of, metadata_of, moves_of, parts_for

from jackfield.core.cache.events import AllBlocksCleared, BlockRemoved, CacheEvents
from jackfield.core.cache.groups import ONE_GROUP, CacheGroup
from jackfield.core.cache.reach import Reach
from jackfield.core.parts.adapters import AdapterRoom
from jackfield.core.parts.encoder_decoder import Source
from jackfield.core.parts.kv_compression import Compaction, LevelMoves
from jackfield.core.parts.kv_transfer import KVDetached, KVReport, TransferResult
from jackfield.core.parts.part_types import PartTypes
from jackfield.core.request import Request, Status
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.pacing.step_sizes import StepSize, StepSizes
from jackfield.core.scheduling.parts.draft_widths import DraftWidths
from jackfield.core.scheduling.parts.guarded_connector import GuardedConnector
from jackfield.core.scheduling.parts.kv_compression import CompressionRule
from jackfield.core.scheduling.parts.kv_transfer import KVTransfer
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan, StepResult
from jackfield.plugins.policies.builtin import FirstComeFirstServed, Priority

conjecture.MAX_SHRINKING_SECONDS = 20
"""Of a machine's failure. A fault of the scheduler fails many, and five minutes is usual."""
EOS = 9
PLANS = msgspec.msgpack.Decoder(StepPlan)


def next_token(prefix: tuple[int, ...], salt: str | None) -> int:
    """The model: what follows depends on every token before it, and on whose cache it reads."""
    return hash((prefix, salt is None)) % 10


def drafts_behind(tokens: list[int], salt: str | None, most: int) -> list[int]:
    """A speculator: the first few drafts are what the model will say, then one is not."""
    seed = hash((len(tokens), *tokens[-2:]))
    count, right = seed % (most + 1), seed // 7 % (most + 2)
    drafts: list[int] = []
    for place in range(count):
        token = next_token((*tokens, *drafts), salt)
        drafts.append(token if place < right else (token + 1) % 10)
    return drafts


class ReplayingWorker:
    """Applies plans as a worker does, in order, and refuses any that break the contract.

    The KV of a position is (tokens up to and including it, salt, group of layers, owner): what real
    KV depends on, who may read it, and with which layers. A column that a slot was not told of is
    not there, and a group's layers read the positions in its window alone. The owner is set once a
    cache is compacted: what remains, and all that is computed from it, is for that request alone.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        groups: tuple[CacheGroup, ...],
        num_drafts: int,
    ) -> None:
        self.groups, self.num_drafts = groups, num_drafts
        self.block_size, self.max_num_seqs, self.budget = block_size, max_num_seqs, budget
        self.num_blocks = num_blocks
        self.kv: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.tables: dict[int, list[dict[int, int]]] = {}
        """Slot → of each group: column → block."""
        self.salts: dict[int, str | None] = {}
        self.held: dict[int, list[list[int | None]]] = {}
        """Compacted slot → of each group: the positions that its cache holds, in order; None: in a
        block of a level."""
        self.leveled: dict[int, list[dict[int, list[tuple[int, int]]]]] = {}
        """Slot → of each group: level → places of its tokens, in order."""
        self.num_compactions = 0
        self.owners: dict[int, int | None] = {}
        """Slot → the number of its compaction."""
        self.drafts: dict[int, list[int]] = {}
        """Slot → what the speculator put behind its tokens."""
        self.bounds: dict[int, int] = {}
        """Slot → the host's bound of `computed`."""
        self.num_accepted = 0

    def forget(self, slots: set[int]) -> None:
        """What the executor's `recover` does; all blocks but `kept` may hold anything by now."""
        for state in self._states:
            state.clear()
        self.kv = {place: what for place, what in self.kv.items() if place[0] in slots}

    @property
    def _states(self) -> tuple[dict[int, Any], ...]:
        return (
            self.tokens, self.computed, self.tables, self.salts, self.held, self.owners,
            self.drafts, self.bounds, self.leveled,
        )  # fmt: skip

    def compact(self, compactions: tuple[Compaction, ...]) -> None:
        """Keep some tokens of each, in any order; which ones is not the plan's business. Before
        the plan's transfers begin, and before its rows. Groups with a reach keep their blocks."""
        assert len({each.slot for each in compactions}) == len(compactions), "compacted twice"
        contents = {}
        whole = [n for n, group in enumerate(self.groups) if group.reach is None]
        new = {each.slot: {b for n in whole for b in each.tables[n]} for each in compactions}
        for each in compactions:
            assert len(each.tables) == len(self.groups), "a table per group"
            for number in whole:
                columns = self.tables[each.slot][number]
                # Later columns may be left from rejected drafts.
                held = range(-(-each.num_tokens // self.block_size))
                table, target = [columns[n] for n in held], each.tables[number]
                if set(target) & set(table):
                    assert list(target) == table[: len(target)], "not in place"
                for slot, written in new.items():
                    assert slot == each.slot or not written & set(table), "written and read"
                places = [self._place(each.slot, number, index) for index in range(each.num_tokens)]
                contents[each.slot, number] = [self.kv[place] for place in places]
        for each in reversed(compactions):
            slot, before = each.slot, self.owners.get(each.slot)
            old = [self._held(slot, number) for number in range(len(self.groups))]
            self.num_compactions += 1
            self.owners[slot] = self.num_compactions
            assert all(len(held) == each.num_tokens for held in old), "has other tokens"
            assert 0 < each.kept <= each.num_tokens, "keeps none, or more"
            dropped = each.num_tokens - each.kept
            for reach in (reach for group in self.groups for reach in group.inner_reaches):
                assert dropped % reach.alignment == 0, "a chunk begins elsewhere"
                assert dropped <= first_seen(reach, each.num_tokens), "drops what is seen"
            self.held[slot] = []
            for number, (held, target) in enumerate(zip(old, each.tables, strict=True)):
                assert len(target) == -(-each.kept // self.block_size), "another number of blocks"
                if number in whole:
                    order = sorted(range(len(held)), key=lambda index: (index * 7919) % 101)
                    chosen = sorted(order[: each.kept])
                    self.tables[slot][number] = dict(enumerate(target))
                    for place, index in enumerate(chosen):
                        what = (*contents[slot, number][index][:3], self.num_compactions)
                        self.kv[self._place(slot, number, place)] = what
                else:
                    chosen = list(range(dropped, each.num_tokens))
                    self._shift(slot, number, dropped, target, before)
                self.held[slot].append([held[index] for index in chosen])

    def move_levels(self, requests: tuple[LevelMoves, ...], sizes: tuple[int, ...]) -> None:
        """Move tokens between levels, the blocks of one request after those of another, and all of
        a move's tokens at once. sizes: level → tokens of a block."""
        for each in requests:
            slot, before = each.slot, self.owners.get(each.slot)
            assert each.num_computed == self.computed[slot], "computed another number"
            old = [self._held(slot, number) for number in range(len(self.groups))]
            self.num_compactions += 1
            self.owners[slot] = before or self.num_compactions
            length = each.num_computed - each.num_dropped
            own = self.leveled.setdefault(slot, [{} for _ in self.groups])
            held: list[list[int | None]] = []
            for number, group in enumerate(self.groups):
                if group.reach is not None:
                    dropped = len(old[number]) - length
                    self._shift(slot, number, dropped, each.tables[number], before)
                    held.append(old[number][dropped:])
                    continue
                blocks, newest = self._move_group(each, number, own[number], sizes)
                assert list(each.tables[number]) == [*blocks, *newest], "another table"
                self.tables[slot][number] = dict(enumerate(each.tables[number]))
                first = old[number].index(None) if None in old[number] else len(old[number])
                whole = [place for place in old[number] if place is not None]
                count = length - len(blocks) * self.block_size
                assert first in (0, len(old[number])) and 0 <= count <= len(whole), (
                    "levels amid newest tokens"
                )
                padding: list[int | None] = [None] * (len(blocks) * self.block_size)
                held.append(padding + whole[len(whole) - count :])
            self.held[slot] = held
            tokens = tuple(
                len(own[0].get(level, ())) for level in range(1, len(each.level_tokens) + 1)
            )
            assert self.groups[0].reach is not None or tokens == each.level_tokens, (
                "miscounted levels"
            )

    def _move_group(
        self,
        each: LevelMoves,
        number: int,
        own: dict[int, list[tuple[int, int]]],
        sizes: tuple[int, ...],
    ) -> tuple[list[int], list[int]]:
        """→ the blocks of levels, in their order, and those of the newest tokens."""
        columns = self.tables[each.slot][number]
        begin = sum(len({block for block, _ in places}) for places in own.values())
        end = -(-len(self._held(each.slot, number)) // self.block_size)
        newest = [columns[column] for column in range(begin, end)]
        for move in each.moves:
            blocks, size = move.blocks[number], sizes[move.source]
            assert move.num_tokens == len(blocks) * size > 0, "moves parts of blocks"
            if move.source:
                places = own[move.source][: move.num_tokens]
                del own[move.source][: move.num_tokens]
            else:
                assert list(blocks) == newest[: len(blocks)], "moves others than the oldest"
                del newest[: len(blocks)]
                places = [(block, offset) for block in blocks for offset in range(size)]
            assert list(dict.fromkeys(block for block, _ in places)) == list(blocks), (
                "moves other blocks"
            )
            contents = [self.kv[place] for place in places]
            order = sorted(range(len(contents)), key=lambda index: (index * 7919) % 101)
            for target in move.targets:
                kept, order = sorted(order[: target.kept]), order[target.kept :]
                assert len(kept) == target.kept > 0, "keeps none, or more"
                had, size = own.setdefault(target.level, []), sizes[target.level]
                assert target.first == len(had) % size, "begins elsewhere in its block"
                assert not target.first or target.blocks[number][0] == had[-1][0], "no gap"
                assert len(target.blocks[number]) == -(-(target.first + len(kept)) // size), (
                    "another number of blocks"
                )
                for place, index in enumerate(kept, target.first):
                    where = target.blocks[number][place // size], place % size
                    self.kv[where] = (*contents[index][:3], self.owners[each.slot])
                    had.append(where)
        levels = [own.get(level, []) for level in range(1, len(sizes))]
        return [block for each in levels for block in dict.fromkeys(b for b, _ in each)], newest

    def _shift(
        self, slot: int, number: int, dropped: int, target: tuple[int, ...], before: int | None
    ) -> None:
        """A table that begins later: what it has is as it was, and for the same request."""
        assert dropped % self.block_size == 0, "drops a part of a block"
        reach = self.groups[number].reach
        assert reach is not None and dropped % reach.alignment == 0, "a chunk begins elsewhere"
        shift, old = dropped // self.block_size, self.tables[slot][number]
        for column, block in enumerate(target):
            assert not block or block == old[column + shift], "moved"
            for offset in range(self.block_size):
                what = self.kv.get((block, offset))
                if block and before is not None and what is not None and what[3] == before:
                    self.kv[block, offset] = (*what[:3], self.owners[slot])
        self.tables[slot][number] = {n: block for n, block in enumerate(target) if block}

    def _held(self, slot: int, number: int = 0) -> list[int | None]:
        held = self.held.get(slot)
        return list(range(self.computed[slot])) if held is None else held[number]

    def run(
        self,
        plan: StepPlan,
        salts: dict[str, str | None],
        report: KVReport | None = None,
        look: bool = False,
    ) -> StepResult:
        """`look`: a plan may have nothing in it, so that news come."""
        for slot in plan.released:
            for state in self._states:
                state.pop(slot, None)
        for rejection in drafts_of(plan).rejections:
            assert rejection.num_tokens > 0, "a rejection of nothing"
            self.bounds[rejection.slot] -= rejection.num_tokens
        for start in plan.starts:
            assert start.slot not in self.tables, "a slot is used twice"
            assert 0 <= start.slot < self.max_num_seqs, "no such slot"
            self.tokens[start.slot] = list(start.token_ids)
            self.computed[start.slot] = self.bounds[start.slot] = start.num_computed_tokens
            # The last one is that of a source.
            self.tables[start.slot] = [{} for _ in range(len(self.groups) + 1)]
            self.salts[start.slot] = salts[start.request_id]
        for write in plan.table_writes:
            columns = range(write.column, write.column + len(write.block_ids))
            assert write.block_ids, "says nothing"
            self.tables[write.slot][write.group].update(zip(columns, write.block_ids, strict=True))

        if not look:
            assert plan.slots or plan.parts or report is not None, "an empty plan"
        if metadata_of(plan) is None:  # Jobs of this process stand for the bytes here.
            assert PartTypes().plan(PLANS.decode(msgspec.msgpack.encode(plan))) == plan, (
                "other on the wire"
            )
        assert len(set(plan.slots)) == len(plan.slots), "a slot has two rows"
        assert len(plan.slots) == len(plan.num_tokens) == len(plan.samples), (
            "columns of two lengths"
        )
        assert plan.total_tokens <= self.budget, "more tokens than a step has"
        started = {start.slot for start in plan.starts}
        num_drafts = drafts_of(plan).num_drafts or (0,) * len(plan.slots)
        assert len(num_drafts) == len(plan.slots), "drafts of other rows"
        kinds = [
            1 if drafts else 2 * (not (count == 1 and sampled and slot not in started))
            for slot, count, sampled, drafts in zip(
                plan.slots, plan.num_tokens, plan.samples, num_drafts, strict=True
            )
        ]
        assert kinds == sorted(kinds), "a decode row after one with drafts, or after a prefill row"
        written: set[tuple[int, int]] = set()
        ahead: dict[int, list[int]] = {}
        """Slot → its tokens and drafts, as this step sees them."""
        for slot, count, drafts in zip(plan.slots, plan.num_tokens, num_drafts, strict=True):
            assert count >= 1 and drafts < count, "a row without a token of its own"
            padding = [0] * drafts
            ahead[slot] = [*self.tokens[slot], *(self.drafts.get(slot, []) + padding)[:drafts]]
            self.bounds[slot] += count
            assert self.bounds[slot] >= self.computed[slot] + count, "the host's bound is none"
            columns = -(-self.bounds[slot] // self.block_size)
            tables = self.tables[slot][: len(self.groups)]
            assert all(columns - 1 in table for table in tables) or slot in self.held, (
                "a row without a block"
            )
            for position in range(self.computed[slot], self.computed[slot] + count):
                prefix = tuple(ahead[slot][: position + 1])
                assert len(prefix) == position + 1, "computes a token that does not exist"
                index = position
                if slot in self.held:
                    index = len(self.held[slot][0])
                    for held in self.held[slot]:
                        held.append(position)
                for number in range(len(self.groups)):
                    place = self._place(slot, number, index)
                    assert place not in written, "two rows write one place"
                    written.add(place)
                    whose = self.whose(slot, position)
                    self.kv[place] = (prefix, whose, number, self.owners.get(slot))
        sampled_ids, counts, proposed, verified = [], [], [], []
        rows = zip(plan.slots, plan.num_tokens, plan.samples, num_drafts, strict=True)
        for slot, count, sampled, drafts in rows:
            first = self.computed[slot]
            self.computed[slot] += count
            end = self.computed[slot]
            assert sampled == (end == len(ahead[slot])), "samples off the end"
            for number, group in enumerate(self.groups):
                held = self._held(slot, number)
                seen = first_seen(group.reach, len(held) - (end - first))
                if group.reach is not None:
                    assert held[seen] == first_seen(group.reach, first), "it sees less than it may"
                places = [self._place(slot, number, n) for n in range(seen, len(held))
                          if held[n] is not None]  # fmt: skip
                positions = [position for position in held[seen:] if position is not None]
                for own in self.leveled.get(slot, [{}] * len(self.groups))[number].values():
                    places += own
                    positions += [len(self.kv[place][0]) - 1 for place in own]
                assert len(set(positions)) == len(positions), "a token is there twice"
                for place, position in zip(places, positions, strict=True):
                    prefix, salt, owner, only = self.kv[place]
                    assert only in (None, self.owners.get(slot)), "another's compacted KV"
                    assert prefix == tuple(ahead[slot][: position + 1]), "another's KV"
                    assert salt == self.whose(slot, position), "another tenant's KV"
                    assert owner == number, "another layer's KV"
            real = min(drafts, len(self.drafts.get(slot, [])))
            accepted = 0
            while sampled:
                place = self._place(slot, 0, len(self._held(slot)) - 1 - drafts + accepted)
                prefix, salt, _, _ = self.kv[place]
                token = next_token(prefix, salt)
                self.tokens[slot].append(token)
                sampled_ids.append(token)
                if accepted == real or token != self.drafts[slot][accepted]:
                    break
                accepted += 1
            self.num_accepted += accepted
            self.computed[slot] -= drafts - accepted
            for held in self.held.get(slot, ()):
                del held[len(held) - (drafts - accepted) :]
            counts.append(1 + accepted if sampled else 0)
            verified.append(real)
            if sampled and self.num_drafts:
                self.drafts[slot] = drafts_behind(
                    self.tokens[slot], self.salts[slot], self.num_drafts
                )
            proposed.append(len(self.drafts.get(slot, [])))
        parts = drafted(proposed=proposed, verified=verified) if self.num_drafts else {}
        if report is not None:
            parts["kv_transfer"] = TransferResult(report)
        return StepResult(plan.step, counts, sampled_ids, parts=parts)

    def whose(self, slot: int, position: int) -> Any:
        """Who may read the KV of a position."""
        return self.salts[slot]

    def _place(self, slot: int, group: int, position: int) -> tuple[int, int]:
        block = self.tables[slot][group][position // self.block_size]
        assert 0 < block < self.num_blocks, "no such block"
        return block, position % self.block_size


def first_seen(reach: Reach | None, position: int) -> int:
    """The first position that a token sees, by definition."""
    if reach is None:
        return 0
    if reach.window is not None:
        return max(0, position - reach.window + 1)
    assert reach.chunk_size is not None, "neither window nor chunks"
    chunks = [p // reach.chunk_size for p in range(position + 1)]
    return next(p for p, c in enumerate(chunks) if chunks[-1] - c <= reach.chunk_lookback)


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


class DrawnSizes(StepSizes):
    """Any size, whatever waits."""

    size = StepSize(0)

    def next_size(self, *what_waits: object) -> StepSize:
        return self.size


class SchedulerMachine(RuleBasedStateMachine):
    """add / schedule / update / finish in any order, up to two steps in flight."""

    worker_class: type[ReplayingWorker] = ReplayingWorker
    connector: FarSide | None = None
    detached: KVDetached | None = None
    """Once its worker half has raised."""

    enable_prefix_caching = True
    enable_chunked_prefill = True
    policy: type = FirstComeFirstServed
    groups: tuple[CacheGroup, ...] = ONE_GROUP
    kv_compression: CompressionRule | None = None
    num_drafts = 0
    draft_widths: DraftWidths | None = None
    max_source_tokens = 0
    num_stages = 1
    adapters: tuple[AdapterRoom, int, int] | None = None
    media: tuple[Any, ...] | None = None
    most_in_flight = 2
    max_num_seqs, budget, max_model_len, num_blocks, block_size = 4, 16, 40, 14, 4

    def __init__(self) -> None:
        super().__init__()
        self.sizes = DrawnSizes(self.budget, chunked=True, ttft_target=0.0)
        self.scheduler = Scheduler(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.policy(),
            hash_key=b"the same for all",
            groups=self.groups,
            parts=parts_for(
                connector=None
                if self.connector is None
                else GuardedConnector(self.connector, AsTheyAre()),
                kv_compression=self.kv_compression,
                num_drafts=self.num_drafts,
                draft_widths=self.draft_widths,
                longest=self.max_model_len if self.draft_widths is not None else 0,
                max_source_tokens=self.max_source_tokens,
                num_stages=self.num_stages,
                adapters=self.adapters,
                media=self.media,
            ),
        )
        if self.enable_chunked_prefill:
            self.scheduler.sizes = self.sizes
        self.cache_events = CacheEvents(self.block_size)
        self.scheduler.kv.watch(self.cache_events)
        self.known_outside: set[tuple[int, bytes]] = set()
        """Blocks that hits find, by group, as one who reads the cache's events knows them."""
        self.worker = self.worker_class(
            self.num_blocks, self.block_size, self.max_num_seqs, self.budget, self.groups,
            self.num_drafts,
        )  # fmt: skip
        self.num_looks = 0
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
        compression=st.sampled_from([None, None, {"budget": 20}, {"ratio": 0.6}, "off"]),
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
        compression,
        stop_ids,
    ):
        self.add_one(
            [(start + i) % 7 for i in range(length)] + tail,
            SamplingParams(
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                prompt_logprobs=prompt_logprobs,
                kv_compression=compression,
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
            assert params.max_tokens is not None, "without a bound"
            # Admission: within the context, and nothing that could never finish.
            max_tokens = min(params.max_tokens, self.max_model_len - len(prompt))
            total = len(prompt) + max_tokens
            source = self.source(prompt)
            limits = self.scheduler.limits.beside_source(len(source))
            if limits.rejection_reason(len(prompt), total) is not None:
                return
            request = Request(
                request_id=str(len(self.all)),
                prompt_token_ids=list(prompt),
                params=params,
                max_tokens=max_tokens,
                seed=0,
                eos_token_ids=frozenset({EOS}),
                priority=priority,
                cache_salt=salt,
                parts={"encoder_decoder": Source(source)} if source else {},
                cache_extra=(Source(source).digest,) if source else (),
                arrival=float(len(self.all)),
                leader=leader,
            )
            salt = self.prepare(request)
            leader = leader or request
            self.all[request.request_id] = request
            self.salts[request.request_id] = salt
            self.received[request.request_id] = []
            self.scheduler.add_requests(request)

    def prepare(self, request: Request) -> Any:
        """Give a request what else it has. Return whose its KV is."""
        return request.cache_salt

    def source(self, prompt: list[int]) -> list[int]:
        """What the encoder of an encoder-decoder model reads."""
        return []

    @rule(
        size=st.none()
        | st.builds(
            StepSize,
            st.sampled_from([4, 9, 16]),
            prompts_alone=st.booleans(),
            longest_whole=st.sampled_from([0, 9]),
        )
    )
    def schedule(self, size=None):
        """size: what the device's pace leads to; None: it is not known."""
        if len(self.flying) < self.most_in_flight:
            size = size or StepSize(self.budget)
            self.sizes.size = size._replace(budget=min(size.budget, self.budget))
            plan = self.scheduler.schedule()
            if plan is not None:
                for start in plan.starts:
                    self.slots[start.slot] = start.request_id
                self.owners[plan.step] = dict(self.slots)
                self.worker.compact(compactions_of(plan))
                self.worker.move_levels(moves_of(plan), self.level_sizes)
                report = self.transfer(plan)
                result = self.worker.run(plan, self.salts, report, look=self.detached is not None)
                self.flying.append((plan, self.with_news(result)))

    def transfer(self, plan: StepPlan) -> KVReport | None:
        """What the worker half of a connector does with a step."""
        return None

    def with_news(self, result: StepResult) -> StepResult:
        """The result as the loop gets it."""
        return result

    @rule()
    def refuse_a_plan(self):
        """The executor raises in place of taking one: it fails as a step, with those in flight
        before it."""
        if len(self.flying) == self.most_in_flight or (plan := self.scheduler.schedule()) is None:
            return
        self.scheduler.not_taken(plan)
        while self.flying:
            self.update()
        for start in plan.starts:
            self.slots[start.slot] = start.request_id
        self.owners[plan.step] = dict(self.slots)
        self.flying.append((plan, StepResult(plan.step, [], [])))
        self.fail_step(False)

    @precondition(lambda self: self.flying)
    @rule()
    def update(self):
        self.take(self.scheduler.update(*self.flying.popleft()))

    @precondition(lambda self: self.flying)
    @rule(behind_ends_well=st.booleans())
    def fail_step(self, behind_ends_well):
        """The oldest step in flight brings nothing, and those behind it are not run, or have ended
        before that was known."""
        plan, result = self.flying.popleft()
        behind = [result for _, result in self.flying]
        self.flying.clear()
        self.worker.forget(self.blocks_of_transfers())
        dropped = behind if behind_ends_well else []
        self.bring_later(result, *(() if behind_ends_well else behind))
        had_part = {self.slot_owner(plan, slot) for slot in plan.slots}
        updates = self.scheduler.fail_step(plan, "on purpose", dropped)
        ended = {u.request.request_id for u in updates if u.error == "on purpose"}
        assert ended <= had_part, "a request without a part in the step was ended"
        self.failed_later |= ended
        self.take(updates)
        assert self.scheduler.num_running == 0, "requests run on after a failed step"

    def blocks_of_transfers(self) -> set[int]:
        """Those that no step writes to."""
        return set()

    def bring_later(self, *results: StepResult) -> None:
        """These are lost; what they tell of transfers is not."""

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
        live = sorted(self.scheduler.requests.by_id)
        if live:
            self.abort_one(data.draw(st.sampled_from(live)))

    def abort_one(self, request_id: str) -> None:
        assert self.scheduler.finish_request(request_id, "abort") is self.all[request_id]
        assert self.scheduler.finish_request(request_id, "abort") is None
        self.aborted.add(request_id)
        self.ended.add(request_id)

    def progress(self) -> None:
        """What else must happen for everything to end."""

    @rule()
    def reset_prefix_cache(self):
        unused = self.scheduler.num_running == 0 and not self.num_transfers
        assert self.scheduler.reset_prefix_cache() == unused, "reset while in use, or not reset"

    @property
    def transfers(self) -> KVTransfer | None:
        return self.scheduler.part(KVTransfer)

    @property
    def num_transfers(self) -> int:
        return 0 if self.transfers is None else len(self.transfers)

    @property
    def num_lost_blocks(self) -> int:
        return 0 if self.transfers is None else self.transfers.num_lost_blocks

    @invariant()
    def books_balance(self):
        # Not after each rule: a check brings counters up to date.
        self.num_looks += 1
        assert self.scheduler.in_flight == len(self.flying), "plans in flight are miscounted"
        assert self.scheduler.num_running <= self.max_num_seqs, "more requests run than slots"
        if self.num_looks % 3:
            return
        self.scheduler.check_invariants()
        self.read_cache_events()
        running = self.scheduler.requests.running.requests
        assert self.scheduler.stats.kv_tokens_missing == sum(map(self.num_missing, running))
        for request in running:
            for table, group in zip(request.tables, self.groups, strict=True):
                most = group.most_blocks(request.num_computed_tokens, self.block_size, self.budget)
                assert sum(map(bool, table)) <= most

    def read_cache_events(self) -> None:
        for event in self.cache_events.take():
            if isinstance(event, AllBlocksCleared):
                self.known_outside.clear()
                continue
            blocks = {(event.group, block_hash) for block_hash in event.block_hashes}
            if isinstance(event, BlockRemoved):
                self.known_outside -= blocks
                continue
            assert not blocks & self.known_outside, "stored twice"
            assert len(event.token_ids) == len(blocks) * self.block_size
            self.known_outside |= blocks
        if not self.enable_prefix_caching:  # Siblings alone find each other's blocks.
            assert not self.known_outside
            return
        keys = self.scheduler.kv.pool._cached
        found = {(key[32] if len(key) > 32 else 0, key[:32]) for key in keys if len(key) <= 33}
        assert self.known_outside == found, "the events say something else than hits find"

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Level → tokens of a block."""
        formats = () if self.kv_compression is None else self.kv_compression.formats
        return (self.block_size, *(form.tokens for form in formats))

    def num_missing(self, request: Request) -> int:
        """Computed tokens that are in no block of a request."""
        if not request.level_tokens:
            return request.num_dropped_tokens
        counted = zip(request.level_tokens, self.level_sizes[1:], strict=True)
        saved = sum(-(-count // size) * self.block_size - count for count, size in counted)
        return request.num_dropped_tokens + saved

    def run_to_the_end(self) -> None:
        for number in range(5000):
            waits = self.num_transfers and not self.num_lost_blocks
            if not self.scheduler.has_work and not self.flying and not waits:
                break
            in_flight = len(self.flying)
            self.progress()
            self.schedule()
            if len(self.flying) in (in_flight, self.most_in_flight):
                if self.flying:
                    self.update()
                else:
                    self.take(self.scheduler.take_failures())
            if number % 3 == 0:
                self.scheduler.check_invariants()
        self.scheduler.check_invariants()

    def teardown(self):
        self.run_to_the_end()
        assert not self.scheduler.has_work, "somebody never finishes"
        assert self.ended == set(self.all), "a request has not ended"
        assert self.scheduler.kv.num_used_blocks == self.num_lost_blocks, "blocks leak"
        self.read_cache_events()
        for request_id, request in self.all.items():
            expected = expected_output(request, self.salts[request_id], self.max_model_len)
            received = self.received[request_id]
            assert received == request.output_token_ids, "the updates say other tokens"
            if request_id in self.failed_later:
                assert received == expected[: len(received)], "other tokens than expected"
            elif request_id in self.failed:
                assert not received, "a failed request has output"
            elif request_id in self.aborted:
                assert received == expected[: len(received)], "other tokens than expected"
            else:
                assert received == expected, "other tokens than expected"
                assert request.finish_reason in ("stop", "length"), "ended for another reason"


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
        self.broken: str | None = None
        """The method that raises in its middle, after `calls_left` calls."""
        self.calls_left = 0

    def fail_in(self, method: str) -> None:
        if method == self.broken:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise RuntimeError("on purpose")

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        self.fail_in("num_external_tokens")
        if not self.known.setdefault(request.request_id, len(self.known) % 2 == 0):
            return None
        assert num_computed_tokens % self.block_size == 0
        first = num_computed_tokens // self.block_size
        keys = list(takewhile(self.store.__contains__, request.block_hashes[first:]))
        return len(keys) * self.block_size + len(self.store) % self.block_size

    def start_load(self, transfer, request, keys, block_ids):
        assert request.status is Status.LOADING
        self.loads.append(Job(transfer, list(block_ids), list(keys), []))
        self.fail_in("start_load")

    def start_save(self, transfer, request, keys, block_ids):
        if self.saves_nothing:
            return []
        self.saves.append(Job(transfer, list(block_ids), list(keys), []))
        self.fail_in("start_save")
        return block_ids

    def request_finished(self, transfer, request):
        holds = len(request.block_ids) % 3 == 2 and not request.compacted
        if holds:
            self.holds.append(Job(transfer, list(request.block_ids), [], []))
        self.fail_in("request_finished")
        return holds, {"blocks": len(request.block_ids)}

    def build_metadata(self):
        jobs = self.loads, self.saves, self.holds
        self.loads, self.saves, self.holds = [], [], []
        self.fail_in("build_metadata")
        return jobs if any(jobs) else None

    def update(self, report):
        self.fail_in("update")


class AsTheyAre:
    """Hands over what the halves send each other, as if they shared a process: the jobs here are
    what the test looks into."""

    def encode_metadata(self, metadata: Any) -> Any:
        return metadata

    def decode_report(self, report: KVReport) -> KVReport:
        return report


CONNECTOR_METHODS = (
    "num_external_tokens", "start_load", "start_save", "request_finished", "build_metadata",
    "update",
)  # fmt: skip


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
        self.asked = False
        """A plan may be made for a report that turns out to be empty."""
        for start in range(3):
            self.add_one([(start + i) % 7 for i in range(30)], SamplingParams(max_tokens=1))
        self.run_to_the_end()
        self.lose_all_cached_blocks()

    def transfer(self, plan: StepPlan) -> KVReport | None:
        loads, saves, holds = metadata_of(plan) or ([], [], [])
        for job in [*loads, *saves, *holds]:
            self.begin("load" if job in loads else "save" if job.keys else "hold", job)
        was_asked, self.asked = self.asked, False
        if not self.finished and not self.failures:
            return KVReport() if was_asked else None
        report = KVReport(finished=tuple(self.finished), failed=self.failures)
        self.finished, self.failures = [], {}
        return report

    def begin(self, kind: str, job: Job) -> None:
        if kind == "load":
            self.scribble(job)
        else:
            job.content = self.content(job)
        self.open.append((kind, job))

    def scribble(self, job: Job) -> None:
        for block_id in job.block_ids:
            self.worker.kv.update(
                {(block_id, i): ((-1,), "rubbish") for i in range(self.block_size)}
            )

    def content(self, job: Job) -> list[list[Any]]:
        return [[self.worker.kv.get((b, i)) for i in range(self.block_size)] for b in job.block_ids]

    def blocks_of_transfers(self) -> set[int]:
        """But not the hits before a load, which a failed step may have been to fill."""
        transfers = self.transfers
        assert transfers is not None
        kept: set[int] = set()
        for transfer, block_ids in transfers._blocks_of.items():
            load = transfers._loads._loads.get(transfer)
            kept.update(block_ids if load is None else load.block_ids)
        return kept

    def bring_later(self, *results: StepResult) -> None:
        self.asked = True
        for result in results:
            sent = result.parts.get("kv_transfer")
            if sent is not None and sent.report is not None:
                self.finished += sent.report.finished
                self.failures |= sent.report.failed

    @rule(number=st.integers(0, 100), share=st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0]))
    def end_a_transfer(self, number, share):
        """The far side is through with one, or fails in the middle."""
        if not self.open or self.detached is not None:
            return
        assert self.connector is not None and self.transfers is not None
        kind, job = self.open.pop(number % len(self.open))
        kv, size = self.worker.kv, self.block_size
        filled = int(share * len(job.block_ids))
        if kind == "load":
            for block_id, key in list(zip(job.block_ids, job.keys, strict=True))[:filled]:
                content = self.connector.store[key]
                kv.update({(block_id, i): content[i] for i in range(size)})
        else:
            now = self.content(job)
            assert now == job.content, "written while it was read"
            self.connector.store.update(zip(job.keys, now, strict=False))
        if share == 1.0:
            self.finished.append(job.transfer)
        else:
            unnamed = filled == 0 and job.transfer % 2 == 0  # which means all of them
            self.failures[job.transfer] = () if unnamed else tuple(job.block_ids[filled:])
        self.transfers.expect_report()

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
        loading = self.scheduler.requests.loading.requests
        if loading:
            self.abort_one(loading[number % len(loading)].request_id)

    @invariant()
    def the_connector_fails_on_purpose_alone(self):
        assert self.connector is not None and self.transfers is not None
        failure = self.transfers.failure
        assert failure is None or "on purpose" in failure, failure

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


class FailingConnectorMachine(ConnectorMachine):
    """At some call of one of its methods, the connector raises.

    A worker half that has raised goes on reading and writing until it has closed.
    """

    methods: tuple[str, ...] = CONNECTOR_METHODS
    closes = True

    @initialize(data=st.data(), calls_left=st.integers(0, 6))
    def break_it(self, data, calls_left):
        assert self.connector is not None
        self.connector.broken = data.draw(st.sampled_from(self.methods))
        self.connector.calls_left = calls_left

    def transfer(self, plan: StepPlan) -> KVReport | None:
        assert self.connector is not None
        try:
            if self.detached is None:
                if metadata_of(plan) is not None:
                    self.connector.fail_in("start")
                self.connector.fail_in("poll")
        except RuntimeError:
            self.detached = KVDetached(f"raised in {self.connector.broken} on purpose")
            jobs = metadata_of(plan) or ([], [], [])
            if self.connector.broken == "poll":
                super().transfer(plan)
            elif jobs[0]:
                self.begin("load", jobs[0][0])  # It came as far as this.
        if self.detached is None:
            return super().transfer(plan)
        for kind, job in self.open:
            if kind == "load":
                self.scribble(job)
            else:
                assert self.content(job) == job.content, "written while it was read"
        return None

    def with_news(self, result: StepResult) -> StepResult:
        sent = result.parts.get("kv_transfer") or TransferResult()
        sent = msgspec.structs.replace(sent, detached=self.detached)
        return msgspec.structs.replace(result, parts={**result.parts, "kv_transfer": sent})

    @rule()
    def close_the_worker_half(self):
        if self.detached is None or self.detached.closed is not None:
            return
        assert self.transfers is not None
        self.detached = msgspec.structs.replace(self.detached, closed=self.closes)
        if self.closes:
            self.open.clear()
        self.transfers.expect_report()

    def progress(self):
        super().progress()
        self.close_the_worker_half()

    def take(self, updates):
        if self.num_lost_blocks:
            without_room = (u for u in updates if u.error and "KV-cache blocks" in u.error)
            self.failed_later.update(u.request.request_id for u in without_room)
        super().take(updates)

    def teardown(self):
        super().teardown()
        transfers = self.transfers
        assert transfers is not None
        assert transfers.failure is None or not transfers._unsent
        assert self.closes or self.num_lost_blocks or not len(transfers)


class FailingWorkerHalfMachine(FailingConnectorMachine):
    methods = ("start", "poll")


class UnclosableWorkerHalfMachine(FailingWorkerHalfMachine):
    closes = False


def test_a_failed_step_empties_the_prefix_cache_while_a_transfer_holds_blocks() -> None:
    """Blocks that steps behind the failed one were to fill have a name already."""

    def begin(prompt: list[int]) -> None:
        machine.add_one(prompt, SamplingParams(max_tokens=2))
        machine.schedule()
        machine.answer()
        machine.schedule()
        assert machine.flying

    machine = ConnectorMachine()
    begin([1, 5, 3] * 4)
    while machine.scheduler.has_work:
        machine.update()  # Its blocks are saved, and held.
        machine.schedule()
    begin([4, 5, 6] * 4)
    assert machine.num_transfers, "nothing is held"
    machine.fail_step(behind_ends_well=False)
    assert not machine.scheduler.kv.pool._cached
    machine.add_one([4, 5, 6] * 4, SamplingParams(max_tokens=2))
    machine.teardown()


class StagesMachine(SchedulerMachine):
    """Three stages, and few blocks for what they have in flight."""

    num_stages, most_in_flight = 3, 4
    num_blocks = 19


class TwoStagesMachine(PriorityMachine):
    num_stages, most_in_flight = 2, 3


class WindowsMachine(SchedulerMachine):
    """A group with all tokens, and windows that begin and end within blocks."""

    groups = (
        CacheGroup((0,)), CacheGroup((1,), Reach(6)), CacheGroup((2,), Reach(6)),
        CacheGroup((3,), Reach(9)),
    )  # fmt: skip
    num_blocks = 37


class OneWindowMachine(SchedulerMachine):
    """A model whose every layer has the same window; a sequence is longer than the cache."""

    groups = (CacheGroup((0, 1), Reach(5)),)
    num_blocks = 9
    budget = 8


class SmallWindowsMachine(PriorityMachine):
    groups = (CacheGroup((0,), Reach(1)), CacheGroup((1,), Reach(3)), CacheGroup((2,)))
    block_size = 1
    num_blocks = 75


class WindowsNoCacheMachine(WindowsMachine):
    enable_prefix_caching = False


class ChunksMachine(SchedulerMachine):
    """Groups with all tokens, a window, and chunks that begin within blocks and with them."""

    groups = (
        CacheGroup((0,)), CacheGroup((1,), Reach(chunk_size=6)), CacheGroup((2,), Reach(9)),
        CacheGroup((3,), Reach(chunk_size=4, chunk_lookback=1)),
    )  # fmt: skip
    num_blocks = 37


class OneChunkMachine(SchedulerMachine):
    """A model whose every layer has the same chunks; a sequence is longer than the cache."""

    groups = (CacheGroup((0, 1), Reach(chunk_size=5)),)
    num_blocks = 9
    budget = 8


MACHINES = (
    WindowsMachine,
    OneWindowMachine,
    SmallWindowsMachine,
    WindowsNoCacheMachine,
    ChunksMachine,
    OneChunkMachine,
    SchedulerMachine,
    PriorityMachine,
    NoCacheNoChunkMachine,
    OneTokenBlocksMachine,
    ConnectorMachine,
    ConnectorPriorityMachine,
    FailingConnectorMachine,
    FailingWorkerHalfMachine,
    UnclosableWorkerHalfMachine,
    StagesMachine,
    TwoStagesMachine,
)
for machine in MACHINES:
    machine.TestCase.settings = settings(
        max_examples=12,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_many_random_steps(machine: Any) -> None:
    run_state_machine_as_test(
        machine, settings=settings(machine.TestCase.settings, max_examples=400)
    )


TestScheduler = SchedulerMachine.TestCase
TestPriority = PriorityMachine.TestCase
TestNoCacheNoChunk = NoCacheNoChunkMachine.TestCase
TestOneTokenBlocks = OneTokenBlocksMachine.TestCase
TestWindows = WindowsMachine.TestCase
TestOneWindow = OneWindowMachine.TestCase
TestSmallWindows = SmallWindowsMachine.TestCase
TestWindowsNoCache = WindowsNoCacheMachine.TestCase
TestChunks = ChunksMachine.TestCase
TestOneChunk = OneChunkMachine.TestCase
TestConnector = ConnectorMachine.TestCase
TestConnectorPriority = ConnectorPriorityMachine.TestCase
TestFailingConnector = FailingConnectorMachine.TestCase
TestFailingWorkerHalf = FailingWorkerHalfMachine.TestCase
TestUnclosableWorkerHalf = UnclosableWorkerHalfMachine.TestCase
TestStages = StagesMachine.TestCase
TestTwoStages = TwoStagesMachine.TestCase

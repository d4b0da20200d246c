"""Block tables of requests: prefix hits, allocation, release, registration of full blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from ..request import Request
from ..step import TableWrite
from .block_pool import NULL_BLOCK, BlockPool
from .events import CacheEvents
from .groups import ONE_GROUP, CacheGroup
from .prefix_index import BlockHasher
from .snapshots import StateSnapshots


class PrefixHits(NamedTuple):
    """Cached blocks of a request's prefix."""

    num_blocks: int = 0
    """Blocks that need not be computed."""
    tables: tuple[list[int], ...] = ()
    """Per group, the blocks of the last of these columns that are read."""
    state: bytes | None = None
    """Hash of the last block, if layers keep states (`StateSnapshots`)."""
    num_seen: int = 0
    """Cached blocks, with or without states."""

    @property
    def block_ids(self) -> Iterable[int]:
        return chain.from_iterable(self.tables)


NO_HITS = PrefixHits()


class KVCacheManager:
    """Allocates KV blocks, a table per group of layers, and finds cached prefixes.

    Steps run in planned order, and each step's rows write KV before any row reads. So a block may
    be registered when the step that fills it is planned, and a freed one reused by the next plan
    despite steps in flight. Likewise blocks out of a group's reach are freed at once, and become
    the null block in the table.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        hash_key: bytes | None = None,
        *,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        max_chunk: int = 1 << 30,
        num_snapshots: int | None = None,
    ) -> None:
        """`hash_key`: see `BlockHasher`; `max_chunk`: most tokens of a request per step;
        `num_snapshots`: of states; 0: every request computes all its tokens; None: layers keep no
        states.
        """
        self.shares_prefixes = num_snapshots != 0
        self.snapshots = StateSnapshots(num_snapshots) if num_snapshots else None
        """None: no states are kept or shared."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups = tuple(groups)
        self.max_chunk = max_chunk
        self.pool = BlockPool(num_blocks)
        self._hasher = BlockHasher(block_size, hash_key)
        self._pending: list[Request] = []
        """Requests with full, unregistered blocks."""
        self._local = [n for n, group in enumerate(self.groups) if group.reach is not None]
        self.whole_groups = [n for n, group in enumerate(self.groups) if group.reach is None]
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._events: CacheEvents | None = None

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_usable - self.pool.num_free

    @property
    def usage(self) -> float:
        """Held share of the blocks, 0 to 1."""
        return self.num_used_blocks / self.pool.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------ prefix hits

    def find_hits(self, request: Request) -> PrefixHits:
        """Return the cached blocks of the longest prefix in all groups.

        Always leaves one token to compute. No hits if the request needs every position (prompt
        logprobs, mean pooling).
        """
        caches = self.enable_prefix_caching or request.private_salt is not None
        if not caches or not request.reads_cache or not self.shares_prefixes:
            return NO_HITS
        limit = (request.num_known_tokens - 1) // self.block_size
        self._hasher.extend(request, limit)
        hashes = request.block_hashes
        end = limit
        for number in self.whole_groups:
            end = next((i for i in range(end) if self._cached(hashes[i], number) is None), end)
        # A shorter prefix needs different blocks within each reach.
        before, seen = -1, end
        while end != before:
            before = end
            for number in self._local:
                end = self._local_hit(hashes, number, end)
            if self.snapshots is not None:
                end = next((i for i in range(end, 0, -1) if hashes[i - 1] in self.snapshots), 0)
        if not end:
            return NO_HITS if self.snapshots is None else NO_HITS._replace(num_seen=seen)
        state = None if self.snapshots is None else hashes[end - 1]
        tables = []
        for number, group in enumerate(self.groups):
            first = group.first_block(end * self.block_size, self.block_size)
            ids = [self._cached(block_hash, number) for block_hash in hashes[first:end]]
            tables.append([block_id for block_id in ids if block_id is not None])
        return PrefixHits(end, tuple(tables), state, seen)

    def _local_hit(self, hashes: Sequence[bytes], number: int, end: int) -> int:
        """Return the longest prefix up to `end` blocks of which the group has the blocks read."""
        group, size = self.groups[number], self.block_size
        missing: int | None = end
        while missing is not None:
            end = missing
            read = range(group.first_block(end * size, size), end)
            # The first missing block excludes the most: no prefix may have it in its reach.
            missing = next((i for i in read if self._cached(hashes[i], number) is None), None)
        return end

    def _cached(self, block_hash: bytes, group: int) -> int | None:
        return self.pool.lookup(_key(block_hash, group))

    # ------------------------------------------------------------ tables

    def can_hold(self, num_tokens: int, hits: PrefixHits = NO_HITS, reserve: int = 0) -> bool:
        """Whether `num_tokens`, including `hits`, and `reserve` blocks fit."""
        missing = self.blocks_for(num_tokens) - hits.num_blocks
        needed = reserve
        for number, group in enumerate(self.groups):
            revived = sum(map(self.pool.is_free, hits.tables[number])) if hits.tables else 0
            most = group.most_blocks(num_tokens, self.block_size, self.max_chunk)
            needed += missing + revived if group.reach is None else min(missing + revived, most)
        return needed <= self.pool.num_free

    def blocks_missing(self, num_tokens: int, hits: PrefixHits) -> int:
        """Return the blocks, over groups, of `num_tokens` besides `hits`."""
        missing = self.blocks_for(num_tokens) - hits.num_blocks
        needed = 0
        for group in self.groups:
            most = group.most_blocks(num_tokens, self.block_size, self.max_chunk)
            needed += missing if group.reach is None else min(missing, most)
        return needed

    def allocate(
        self, request: Request, num_new_tokens: int, hits: PrefixHits = NO_HITS
    ) -> list[TableWrite] | None:
        """Allocate and append blocks for the next `num_new_tokens`, releasing blocks out of reach
        first.

        `hits`, from `find_hits`, precede them and count as computed. Returns the new blocks; None,
        otherwise unchanged, if too few are free.
        """
        pool, tables = self.pool, request.tables
        if not tables:
            tables = request.tables = [[] for _ in self.groups]
            request.num_released_blocks = [0] * len(tables)
        elif self._local:
            self._release_out_of_reach(request)
        computed, column, revived = request.num_kv_tokens, len(tables[0]), 0
        if hits.num_blocks:
            computed += hits.num_blocks * self.block_size
            column += hits.num_blocks
            revived = sum(map(pool.is_free, hits.block_ids))
        count = self.blocks_for(computed + num_new_tokens) - column
        if count * len(tables) + revived > pool.num_free:
            return None
        if hits.num_blocks:
            for number, (table, ids) in enumerate(zip(tables, hits.tables, strict=True)):
                pool.hold(ids)
                request.num_released_blocks[number] = hits.num_blocks - len(ids)
                table.extend([NULL_BLOCK] * (hits.num_blocks - len(ids)))
                table.extend(ids)
            request.num_computed_tokens = computed + request.num_dropped_tokens
        writes: list[TableWrite] = []
        if count <= 0:
            return writes
        slot = request.slot
        for number, table in enumerate(tables):
            new = pool.allocate(count)
            table += new
            writes.append(TableWrite(slot, number, column, tuple(new)))
        return writes

    def append_blocks(self, requests: Collection[Request]) -> list[TableWrite] | None:
        """Append a block to all tables of requests with full blocks; `register_pending` registers
        those.

        None, unchanged, if too few are free.
        """
        pool, count = self.pool, len(requests) * len(self.groups)
        if count > pool.num_free:
            return None
        new = iter(pool.allocate(count))
        writes: list[TableWrite] = []
        for request in requests:
            slot = request.slot
            for number, table in enumerate(request.tables):
                block_id = next(new)
                writes.append(TableWrite(slot, number, len(table), (block_id,)))
                table.append(block_id)
            if self._local:
                self.register(request)
                self._release_out_of_reach(request)
        if not self._local:
            self._pending += requests
        return writes

    def register_pending(self) -> None:
        """Register `append_blocks`' leftovers: after the plan is sent, before the next lookup."""
        pending, self._pending = self._pending, []
        for request in pending:
            if request.tables:
                self.register(request)

    def _release_out_of_reach(self, request: Request) -> None:
        """Release blocks that no later step reads."""
        for number in self._local:
            certain = request.num_kv_tokens - request.num_unverified_tokens
            first = self.groups[number].first_block(certain, self.block_size)
            released = request.num_released_blocks[number]
            if first > released:
                table = request.tables[number]
                self.pool.release(table[released:first])
                table[released:first] = [NULL_BLOCK] * (first - released)
                request.num_released_blocks[number] = first

    def whole_tables(self, request: Request) -> list[TableWrite]:
        return [
            TableWrite(request.slot, number, released, tuple(table[released:]))
            for number, (table, released) in enumerate(
                zip(request.tables, request.num_released_blocks, strict=True)
            )
            if table
        ]

    def trim(self, request: Request) -> None:
        """Release the last blocks of rejected drafts."""
        columns = self.blocks_for(request.num_kv_tokens)
        for table in request.tables:
            if len(table) > columns:
                self.pool.release(table[columns:])
                del table[columns:]

    def free(self, request: Request) -> None:
        """Release the request's blocks, still found by hits until reused."""
        self.register(request)
        for table, released in zip(request.tables, request.num_released_blocks, strict=True):
            self.pool.release(table[released:])
        request.tables = []
        request.num_released_blocks = []
        request.num_registered_blocks = 0
        request.compacted = request.stale = False
        request.num_dropped_tokens = 0
        request.level_tokens = request.level_positions = ()

    # ------------------------------------------------------------ for compactions

    def num_held(self, request: Request) -> int:
        """Return the request's blocks, over groups."""
        return sum(map(len, request.tables)) - sum(request.num_released_blocks)

    def blocks_to_grow(
        self, request: Request, num_tokens: int, max_chunk: int | None = None
    ) -> int:
        """Return the blocks, over groups, that a running request still takes until its cache has
        `num_tokens`, with at most `max_chunk` of them per step.
        """
        blocks, max_chunk = 0, max_chunk or self.max_chunk
        groups = zip(self.groups, request.tables, request.num_released_blocks, strict=True)
        for group, table, released in groups:
            most = group.most_blocks(num_tokens, self.block_size, max_chunk)
            blocks += max(0, most - (len(table) - released))
        return blocks

    def drop_columns(self, request: Request, columns: int) -> None:
        """Let the tables of groups with a reach begin later, by `columns` that are not read any
        more.
        """
        if self._local:
            self._release_out_of_reach(request)
        for number in self._local:
            assert not any(request.tables[number][:columns]), "a block within reach is dropped"
            del request.tables[number][:columns]
            request.num_released_blocks[number] -= columns

    def watch(self, events: CacheEvents) -> None:
        """Tell of blocks that hits find, or find no more, from now on."""
        self._events = self.pool.watch = events

    # ------------------------------------------------------------ names

    def change_weights(self, identity: str, requests: Iterable[Request]) -> None:
        """Find what was cached so far no more: other weights compute from now on. What these
        requests have in the cache is theirs alone.

        identity: of the weights; never used before for others.
        """
        self.register_pending()
        self._hasher.weights = identity
        if self._events is not None:
            self._events.cleared()
        for request in requests:
            request.stale = bool(request.tables)
            request.block_hashes = []
            request.num_registered_blocks = 0

    def count_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """Count a request's prefix lookup, once."""
        if self.enable_prefix_caching and request.reads_cache:
            self.num_queried_tokens += request.num_prompt_tokens
            self.num_hit_tokens += num_hit_tokens

    def register(self, request: Request) -> None:
        """Register the request's full blocks with known, planned tokens, if they are named so."""
        if not request.is_named or (
            not self.enable_prefix_caching and request.private_salt is None
        ):
            return
        if not self.shares_prefixes:
            return
        num_known = len(request.prompt_token_ids) + len(request.output_token_ids)
        num_tokens = request.num_computed_tokens
        num_full = (num_tokens if num_tokens < num_known else num_known) // self.block_size
        first = request.num_registered_blocks
        if num_full > first:
            self._hasher.extend(request, num_full)
            hashes = request.block_hashes[first:num_full]
            for number, table in enumerate(request.tables):
                keys = [_key(each, number) for each in hashes] if number else hashes
                # A null block stands for one out of reach, which was given back.
                self.register_as(request, first, table[first:num_full], keys, number)
            request.num_registered_blocks = num_full

    def register_as(
        self,
        request: Request,
        first: int,
        block_ids: Sequence[int],
        keys: Sequence[bytes],
        group: int = 0,
    ) -> None:
        """Register blocks of a request, from its block number `first` on, under these keys."""
        if self._events is not None:
            known = self.pool.lookup
            new = [
                place
                for place, (block_id, key) in enumerate(zip(block_ids, keys, strict=True))
                if block_id != NULL_BLOCK and known(key) is None
            ]
            self._events.stored(request, group, first, keys, new)
        self.pool.register_all(block_ids, keys)

    def snapshot(self, request: Request) -> int | None:
        """Return a snapshot row for the states after the computed tokens, which fill known blocks;
        None: not kept, as those are not that were computed from a compacted cache.
        """
        caches = self.enable_prefix_caching or request.private_salt is not None
        if self.snapshots is None or not caches or not request.is_named:
            return None
        num_blocks = request.num_computed_tokens // self.block_size
        self._hasher.extend(request, num_blocks)
        return self.snapshots.save(request.block_hashes[num_blocks - 1])

    def source_keys(self, request: Request, num_blocks: int) -> list[bytes]:
        """Return the keys of a source's blocks, or []."""
        if not self.enable_prefix_caching and request.private_salt is None:
            return []
        # The root holds the source's digest, and the salts. No other key has this length.
        root = self._hasher.root(request)
        return [root + block.to_bytes(4, "big") for block in range(num_blocks)]

    def block_keys(self, request: Request, num_blocks: int) -> list[bytes]:
        self._hasher.extend(request, num_blocks)
        return request.block_hashes[:num_blocks]

    def invalidate(self, request: Request) -> None:
        if self.snapshots is not None:
            for block_hash in request.block_hashes:
                self.snapshots.forget(block_hash)
        num_named = request.num_registered_blocks
        if request.compacted:
            # Released since: invalidate the blocks that have their content now.
            for block_hash in request.block_hashes[:num_named]:
                for number in range(len(self.groups)):
                    if (cached := self._cached(block_hash, number)) is not None:
                        self.pool.forget(cached)
            return
        for number, table in enumerate(request.tables):
            for i, block_id in enumerate(table):
                if block_id == NULL_BLOCK and i < num_named:
                    # Released since: invalidate the block that has this content now.
                    block_id = self._cached(request.block_hashes[i], number) or NULL_BLOCK
                if block_id != NULL_BLOCK:
                    self.pool.forget(block_id)
        request.num_registered_blocks = len(request.tables[0]) if request.tables else 0

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False, unchanged, while a request holds one."""
        if self.num_used_blocks:
            return False
        self.forget_all()
        return True

    def forget_all(self) -> None:
        """Forget all blocks while no request holds one."""
        self.pool.forget_all()
        if self.snapshots is not None:
            self.snapshots.forget_all()

    # ------------------------------------------------------------ looking in

    def check(self, requests: Iterable[Request], others: Iterable[int] = ()) -> None:
        """Raise AssertionError unless these requests and `others` (references besides) explain the
        pool's state.
        """
        block_ids = list(others)
        for request in requests:
            columns = self.blocks_for(request.num_kv_tokens)
            assert len(request.tables) == len(self.groups), f"{request.request_id}: no table"
            named = request.num_registered_blocks
            assert named * self.block_size <= request.num_known_tokens, (
                f"{request.request_id}: {named} blocks have names, with "
                f"{request.num_known_tokens} tokens known"
            )
            for table, released in zip(request.tables, request.num_released_blocks, strict=True):
                assert len(table) == columns, (
                    f"{request.request_id}: {len(table)} blocks for {request.num_kv_tokens} tokens"
                )
                assert not any(table[:released]), f"{request.request_id}: holds what it released"
                assert all(table[released:]), f"{request.request_id}: a null block within reach"
                block_ids += table[released:]
        self.pool.check(block_ids)


def _key(block_hash: bytes, group: int) -> bytes:
    """Return a block's cache key per group; the first group's is the hash."""
    return block_hash + bytes([group]) if group else block_hash


class NoKVCache(KVCacheManager):
    """For models without a KV cache (encoders)."""

    def __init__(self, block_size: int) -> None:
        super().__init__(2, block_size, enable_prefix_caching=False)

    @property
    def num_usable_blocks(self) -> int:
        return 0

    @property
    def usage(self) -> float:
        return 0.0

    def blocks_for(self, num_tokens: int) -> int:
        return 0

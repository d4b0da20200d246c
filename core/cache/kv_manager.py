"""Block tables of requests: prefix hits, allocation, registration of full blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..scheduling.request import Request
from .block_pool import BlockPool
from .prefix_index import BlockHasher


class KVCacheManager:
    """Gives requests the blocks that their tokens' KV goes to.

    Steps run in the order they were planned, and every row of a step writes its KV before any row
    reads. So a block may be registered as soon as the step that fills it is planned, and a freed
    one may be reused by the next plan although a step in flight still touches it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        hash_key: bytes | None = None,
    ) -> None:
        """`hash_key`: see `BlockHasher`."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self._hasher = BlockHasher(block_size, hash_key)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_usable - self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return self.num_used_blocks / self.pool.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_hits(self, request: Request) -> list[int]:
        """Cached blocks of the longest known prefix; changes nothing.

        At least one token is left to compute. None for a request that needs every position
        computed (prompt logprobs, a mean over the prompt).
        """
        if not self._caches(request) or not request.reads_cache:
            return []
        limit = (request.num_known_tokens - 1) // self.block_size
        self._hasher.extend(request, limit)
        hits = []
        for block_hash in request.block_hashes[:limit]:
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def can_hold(self, num_tokens: int, hits: Sequence[int] = (), reserve: int = 0) -> bool:
        """Whether blocks for `num_tokens`, `hits` among them, are to be had, and `reserve` left."""
        revived = sum(map(self.pool.is_free, hits))
        return self.blocks_for(num_tokens) - len(hits) + revived + reserve <= self.pool.num_free

    def allocate(
        self, request: Request, num_new_tokens: int, hits: Sequence[int] = ()
    ) -> list[int] | None:
        """Blocks for the next `num_new_tokens`, appended to the request's table and returned.

        `hits`, from `find_hits`, go before them and count as computed. None, and nothing changes,
        when there are too few blocks.
        """
        table = request.block_ids
        computed = request.num_computed_tokens + len(hits) * self.block_size
        count = self.blocks_for(computed + num_new_tokens) - len(table) - len(hits)
        revived = sum(map(self.pool.is_free, hits)) if hits else 0
        if count + revived > self.pool.num_free:
            return None
        if hits:
            self.pool.hold(hits)
            table.extend(hits)
            request.num_computed_tokens = computed
        new = self.pool.allocate(count) if count > 0 else []
        table.extend(new)
        return new

    def count_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """For the statistics, once per request."""
        if self.enable_prefix_caching and request.reads_cache:
            self.num_queried_tokens += request.num_prompt_tokens
            self.num_hit_tokens += num_hit_tokens

    def register(self, request: Request) -> None:
        """Let hits find the request's full blocks whose tokens are known and planned."""
        if not self._caches(request):
            return
        num_full = min(request.num_computed_tokens, request.num_known_tokens) // self.block_size
        if num_full > request.num_registered_blocks:
            self._hasher.extend(request, num_full)
            for i in range(request.num_registered_blocks, num_full):
                self.pool.register(request.block_ids[i], request.block_hashes[i])
            request.num_registered_blocks = num_full

    def block_keys(self, request: Request, num_blocks: int) -> list[bytes]:
        """Names of the request's first blocks, whose tokens must be known."""
        self._hasher.extend(request, num_blocks)
        return request.block_hashes[:num_blocks]

    def free(self, request: Request) -> None:
        """Take the request's blocks; their content stays findable until they are reused."""
        self.register(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_registered_blocks = 0

    def distrust(self, request: Request) -> None:
        """The request failed: no hit may find what it computed."""
        for block_id in request.block_ids:
            self.pool.forget(block_id)
        request.num_registered_blocks = len(request.block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing changes, while a request holds one."""
        if self.num_used_blocks:
            return False
        self.pool.forget_all()
        return True

    def check(self, requests: Iterable[Request], others: Iterable[int] = ()) -> None:
        """Raise AssertionError unless exactly these requests, and `others` (blocks held on top,
        one entry a holder), explain the pool's state."""
        held = [block_id for request in requests for block_id in request.block_ids]
        self.pool.check([*held, *others])

    def _caches(self, request: Request) -> bool:
        return self.enable_prefix_caching or request.private_salt is not None


class NoKVCache(KVCacheManager):
    """For models that keep nothing of a token (encoders): no request needs a block."""

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

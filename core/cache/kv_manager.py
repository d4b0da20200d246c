"""Which blocks each request holds: allocation, prefix hits, registration of full blocks."""

from __future__ import annotations

from ..scheduling.request import Request
from .block_pool import BlockPool
from .hashing import block_hash, root_hash


class KVCacheManager:
    """Block tables over one pool.

    A block is registered as soon as its tokens are known and scheduled: within a step, every layer
    writes keys and values before anything reads them, so even a later row of the same step may use
    it.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.queries = 0
        """Prompt tokens looked up."""
        self.hits = 0
        """Prompt tokens found."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_hits(self, request: Request) -> list[int]:
        """Cached blocks that hold the request's first tokens; at least one token stays to compute."""
        if not self._caches(request) or request.params.prompt_logprobs is not None:
            return []
        self._extend_hashes(request)
        usable = (request.num_known_tokens - 1) // self.block_size
        found = []
        for digest in request.block_hashes[:usable]:
            block = self.pool.find(digest)
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, request: Request, hits: list[int], num_new_tokens: int) -> bool:
        """Give `request` its hits and room for `num_new_tokens` more; False changes nothing."""
        total = self.blocks_for(len(hits) * self.block_size + num_new_tokens)
        fresh = total - len(hits)
        revived = sum(self.pool.is_free(block) for block in hits)
        if fresh + revived > self.pool.num_free:
            return False
        self.pool.share(hits)
        request.block_ids = [*hits, *self.pool.take(fresh)]
        return True

    def count_lookup(self, request: Request, num_hit: int) -> None:
        """Statistics of an admission: its first one counts."""
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_hit
            self.queries += request.num_prompt_tokens
            self.hits += num_hit

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Room for `num_tokens` in all; → the new blocks, or None, which changes nothing."""
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return []
        if missing > self.pool.num_free:
            return None
        new = self.pool.take(missing)
        request.block_ids.extend(new)
        return new

    def register(self, request: Request) -> None:
        """Make the full blocks of computed, known tokens findable."""
        if not self._caches(request):
            return
        full = min(request.num_computed_tokens, request.num_known_tokens) // self.block_size
        if full <= request.num_registered_blocks:
            return
        self._extend_hashes(request)
        for index in range(request.num_registered_blocks, full):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        request.num_registered_blocks = full

    def free(self, request: Request) -> None:
        """Take the request's blocks away; its tail is reused first."""
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_registered_blocks = 0

    def _caches(self, request: Request) -> bool:
        return self.enable_prefix_caching or request.shares_prompt

    def _extend_hashes(self, request: Request) -> None:
        """Hash the full blocks of known tokens that have no hash yet."""
        hashes, size = request.block_hashes, self.block_size
        if len(hashes) == request.num_known_tokens // size:
            return
        if hashes:
            parent = hashes[-1]
        else:
            extra = [] if request.cache_salt is None else [f"salt:{request.cache_salt}"]
            if not self.enable_prefix_caching:
                extra.append(f"siblings:{(request.leader or request).request_id}")
            parent = root_hash(extra)
        for start in range(len(hashes) * size, request.num_known_tokens - size + 1, size):
            parent = block_hash(parent, request.tokens(start, start + size))
            hashes.append(parent)

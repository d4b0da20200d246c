"""Which blocks a KV connector has, and which it is to be offered for saving."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from ...cache.kv_manager import KVCacheManager
from ...request import Request


class Saves:
    """The blocks of requests, as far as the connector was offered them."""

    def __init__(self, kv: KVCacheManager, *, saving: bool) -> None:
        """saving: whether blocks are offered at all."""
        self._kv = kv
        self._saving = saving
        self._offered: dict[Request, int] = {}
        """Unfinished request → columns of its block table that were offered, or need not be."""
        self._held_prompts: dict[Request, tuple[int, list[int]]] = {}
        """Compacted request → blocks of its prompt that steps in flight fill, one reference each,
        and the column of the first."""
        self._stored: dict[int, bytes] = {}
        """Block → key of the content that the connector has of it, or is saving."""

    def admitted(self, request: Request, num_hits: int) -> None:
        """Note which of a request's `num_hits` cached blocks need not be offered.

        The connector may lack a block that is in the cache: its request was aborted before the
        step's result arrived, or its save was declined or has failed. While it lacks one, it finds
        none of those that follow.
        """
        self._offered[request] = self._num_stored(request, num_hits)

    def _num_stored(self, request: Request, num_hits: int) -> int:
        if self._saving:
            hit_blocks = zip(request.block_ids[:num_hits], request.block_hashes, strict=False)
            for number, (block_id, key) in enumerate(hit_blocks):
                if self._stored.get(block_id) != key:
                    return number
        return num_hits

    def next_offer(
        self, request: Request, num_computed: int
    ) -> tuple[list[bytes], list[int]] | None:
        """Return the keys and blocks that are full with the results of `num_computed` tokens, and
        were not offered before; None: there are none."""
        first, full = self._offered.get(request, 0), num_computed // self._kv.block_size
        if full <= first or not self._saving:
            return None
        if request.is_named:
            blocks = request.block_ids[first:full]
        elif request in self._held_prompts:
            first, blocks = self._held_prompts[request]
            if full < first + len(blocks):
                return None
            full = first + len(blocks)
        else:
            return None
        self._offered[request] = full
        return self._kv.block_keys(request, full)[first:], blocks

    def store(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Note blocks that the connector has, or is saving, with their keys."""
        self._stored.update(blocks)

    def lose(self, blocks: Iterable[int]) -> None:
        """Note blocks whose save has failed."""
        for block_id in blocks:
            self._stored.pop(block_id, None)

    def hold_prompt(self, request: Request) -> None:
        """Hold the full blocks of a request's prompt that were not offered yet, as its cache is
        about to be compacted: they are offered when their results have arrived."""
        computed = min(request.num_prompt_tokens, request.num_computed_tokens)
        first, full = self._offered.get(request, 0), computed // self._kv.block_size
        if full <= first or not self._saving or not request.is_named:
            return
        blocks = request.block_ids[first:full]
        self._kv.pool.hold(blocks)
        self._held_prompts[request] = first, blocks

    def let_prompt_go(self, request: Request) -> None:
        """Release what `hold_prompt` holds."""
        _, blocks = self._held_prompts.pop(request, (0, []))
        self._kv.pool.release(blocks)

    def ended(self, request: Request) -> None:
        self.let_prompt_go(request)
        self._offered.pop(request, None)

    @property
    def held(self) -> Iterator[int]:
        """Held block ids, one entry per reference."""
        return chain.from_iterable(blocks for _, blocks in self._held_prompts.values())

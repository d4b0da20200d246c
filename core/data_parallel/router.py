"""Chooses a request's member: by longest known prefix, then load.

It uses only this process's records, so choices are immediate, and bursts spread before they begin.
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ..request import RequestSpec

CHUNK_TOKENS = 64
"""Tokens per compared chunk of a prefix."""
EXPECTED_TOKENS = 256
"""Assumed tokens of a completion, unless limited."""
DIGEST_BYTES = 16


@dataclass(eq=False)
class Placement:
    """Where a request was sent, and its cost there."""

    member: int
    prompt_cost: int
    """Prompt tokens to compute; 0 afterwards."""
    output_cost: int
    """Tokens to generate."""
    num_known_tokens: int
    """Leading prompt tokens known to the member."""
    moved: bool = False
    """Whether another member died with it."""


class Router:
    """Tracks each member's work and known prefixes.

    A member's cost is its pending tokens plus the prompt's unknown ones; the cheapest is chosen. So
    a prefix wins unless its member is busier by more tokens than it saves.
    """

    def __init__(self, num_members: int, block_size: int, *, finds_prefixes: bool) -> None:
        """finds_prefixes: `enable_prefix_caching`."""
        self.loads = [0] * num_members
        """[num_members] Pending tokens of prompts and outputs."""
        self.num_requests = [0] * num_members
        """[num_members] Unfinished requests."""
        self._chunk = block_size * max(1, CHUNK_TOKENS // block_size)
        self._finds_prefixes = finds_prefixes
        self._prefixes: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in self.loads]
        """[num_members] Prefix hashes by whole chunks, latest last."""
        self._capacities = [0] * num_members
        """[num_members] Most prefixes to remember."""
        self._last = num_members - 1
        """Last choice; ties go to the next member."""
        # With a key, so that no one can make prompts that count as the prefix of others.
        self._keyed = blake2b(key=secrets.token_bytes(32), digest_size=DIGEST_BYTES)

    def begin_member(self, member: int, num_cached_tokens: int) -> None:
        """Reset a started member. num_cached_tokens: its cache's size, which bounds the
        prefixes.
        """
        self._prefixes[member].clear()
        self._capacities[member] = num_cached_tokens // self._chunk

    def forget_prefixes(self) -> None:
        for prefixes in self._prefixes:
            prefixes.clear()

    def place(self, spec: RequestSpec, members: Sequence[int]) -> Placement:
        """Choose one of `members`, and count the request for it."""
        hashes = self._hashes(spec) if self._finds_prefixes else []
        known_tokens = {member: self._num_known(member, hashes) if spec.reads_cache else 0
                 for member in members}  # fmt: skip
        count = len(self.loads)
        member = min(
            members,
            key=lambda m: (self.loads[m] - known_tokens[m], self.num_requests[m],
                           (m - self._last - 1) % count),
        )  # fmt: skip
        self._last = member
        self._remember(member, hashes)
        placement = Placement(
            member,
            prompt_cost=len(spec.prompt_token_ids) - known_tokens[member],
            output_cost=spec.params.n * min(spec.max_tokens, EXPECTED_TOKENS),
            num_known_tokens=known_tokens[member],
        )
        self.loads[member] += placement.prompt_cost + placement.output_cost
        self.num_requests[member] += 1
        return placement

    def begin(self, placement: Placement) -> None:
        """Stop counting a request's prompt, at its first token."""
        self.loads[placement.member] -= placement.prompt_cost
        placement.prompt_cost = 0

    def release(self, placement: Placement) -> None:
        """Stop counting a request, once."""
        self.begin(placement)
        self.loads[placement.member] -= placement.output_cost
        self.num_requests[placement.member] -= 1

    def _hashes(self, spec: RequestSpec) -> list[bytes]:
        size = self._chunk * array("q").itemsize
        tokens = memoryview(array("q", spec.prompt_token_ids)).cast("B")
        source = b"" if spec.source is None else spec.source.digest.encode()
        adapter = spec.adapter and (spec.adapter.name, spec.adapter.tenant)
        digest = self._digest(repr((spec.cache_salt, adapter)).encode(), source)
        hashes = []
        # As in the cache, a prompt's last token is never part of a hit.
        for start in range(0, len(tokens) - size, size):
            digest = self._digest(digest, tokens[start : start + size])
            hashes.append(digest)
        return hashes

    def _digest(self, *parts: bytes | memoryview) -> bytes:
        hasher = self._keyed.copy()
        for part in parts:
            hasher.update(part)
        return hasher.digest()

    def _num_known(self, member: int, hashes: list[bytes]) -> int:
        prefixes = self._prefixes[member]
        count = next((n for n, each in enumerate(hashes) if each not in prefixes), len(hashes))
        return count * self._chunk

    def _remember(self, member: int, hashes: list[bytes]) -> None:
        """Note a prompt's prefixes; the longest is forgotten first, as in the cache."""
        prefixes = self._prefixes[member]
        for each in reversed(hashes):
            prefixes[each] = None
            prefixes.move_to_end(each)
        while len(prefixes) > self._capacities[member]:
            prefixes.popitem(last=False)

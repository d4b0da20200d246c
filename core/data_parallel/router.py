"""Chooses the member that serves a request: by the longest prefix that it knows, then by load.

Everything here is this process's own account: what it has sent to whom, and what has not ended.
Members are not asked, so a choice is made at once, and a burst of requests is spread before any of
them has begun.
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
"""Prefixes are compared in chunks of about so many tokens: a shorter one saves next to nothing."""
EXPECTED_TOKENS = 256
"""Tokens that a completion counts for, unless it may have fewer: how many it will have is not
known."""
DIGEST_BYTES = 16


@dataclass(eq=False)
class Placement:
    """Where a request was sent, and what it counts for there."""

    member: int
    prompt_cost: int
    """Tokens of the prompt that the member has to compute; 0 once it has."""
    output_cost: int
    """Tokens to generate."""
    num_known_tokens: int
    """Leading tokens of the prompt that had been sent to the member before."""
    moved: bool = False
    """Whether another member had it, and died."""


class Router:
    """Counts what each member has to do, and remembers which prefixes were sent to it.

    A member costs what it has to do already and the part of the prompt that it does not know; the
    cheapest one gets the request. So the longest known prefix decides, unless its member has more
    to do than another one by more tokens than the prefix saves.
    """

    def __init__(self, num_members: int, block_size: int, *, finds_prefixes: bool) -> None:
        """finds_prefixes: whether members keep prefixes (`enable_prefix_caching`)."""
        self.loads = [0] * num_members
        """[num_members] Tokens that each member has to compute, prompts and outputs."""
        self.num_requests = [0] * num_members
        """[num_members] Requests of each member that have not ended."""
        self._chunk = block_size * max(1, CHUNK_TOKENS // block_size)
        self._finds_prefixes = finds_prefixes
        self._prefixes: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in self.loads]
        """[num_members] Hashes of prefixes, each of whole chunks, the latest last."""
        self._capacities = [0] * num_members
        """[num_members] Most prefixes to remember."""
        self._last = num_members - 1
        """The member chosen last; of equal ones the next one is chosen."""
        # With a key, so that no one can make prompts that count as the prefix of others.
        self._keyed = blake2b(key=secrets.token_bytes(32), digest_size=DIGEST_BYTES)

    def begin_member(self, member: int, num_cached_tokens: int) -> None:
        """Forget the prefixes of a member that has started. num_cached_tokens: size of its cache,
        which holds no more prefixes."""
        self._prefixes[member].clear()
        self._capacities[member] = num_cached_tokens // self._chunk

    def forget_prefixes(self) -> None:
        """Forget the prefixes of all members."""
        for prefixes in self._prefixes:
            prefixes.clear()

    def place(self, spec: RequestSpec, members: Sequence[int]) -> Placement:
        """Choose one of `members`, at least one, and count the request for it."""
        hashes = self._hashes(spec) if self._finds_prefixes else []
        known = {member: self._num_known(member, hashes) if spec.reads_cache else 0
                 for member in members}  # fmt: skip
        count = len(self.loads)
        member = min(
            members,
            key=lambda m: (self.loads[m] - known[m], self.num_requests[m],
                           (m - self._last - 1) % count),
        )  # fmt: skip
        self._last = member
        self._remember(member, hashes)
        placement = Placement(
            member,
            prompt_cost=len(spec.prompt_token_ids) - known[member],
            output_cost=spec.params.n * min(spec.max_tokens, EXPECTED_TOKENS),
            num_known_tokens=known[member],
        )
        self.loads[member] += placement.prompt_cost + placement.output_cost
        self.num_requests[member] += 1
        return placement

    def begin(self, placement: Placement) -> None:
        """Count a request's prompt no longer: its first token is there."""
        self.loads[placement.member] -= placement.prompt_cost
        placement.prompt_cost = 0

    def release(self, placement: Placement) -> None:
        """Count a request no longer, once: it has ended, or was not accepted."""
        self.begin(placement)
        self.loads[placement.member] -= placement.output_cost
        self.num_requests[placement.member] -= 1

    def _hashes(self, spec: RequestSpec) -> list[bytes]:
        """Return the chained hash of each whole chunk of the prompt."""
        size = self._chunk * array("q").itemsize
        tokens = memoryview(array("q", spec.prompt_token_ids)).cast("B")
        source = array("q", spec.source_token_ids).tobytes()
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
        """Return the leading tokens of a prompt that a member knows."""
        prefixes = self._prefixes[member]
        count = next((n for n, each in enumerate(hashes) if each not in prefixes), len(hashes))
        return count * self._chunk

    def _remember(self, member: int, hashes: list[bytes]) -> None:
        """Note a prompt's prefixes, the longest first to be forgotten, as in the cache."""
        prefixes = self._prefixes[member]
        for each in reversed(hashes):
            prefixes[each] = None
            prefixes.move_to_end(each)
        while len(prefixes) > self._capacities[member]:
            prefixes.popitem(last=False)

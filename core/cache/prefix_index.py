"""Hashes of block contents: chained and keyed, over token ids."""

from __future__ import annotations

import secrets
from hashlib import blake2b
from struct import pack

from ..request import Request

DIGEST_BYTES = 32


class BlockHasher:
    """hash(block) = BLAKE2b(key, parent's hash + the block's token ids).

    The first block's parent hashes whatever else the KV depends on, and tenants
    (`Request.cache_salt`, `Request.cache_extra`). What the KV depends on from a position on
    (`Request.late_extra`) is added to the block that holds it, and so to all that follow. The key
    is random, against searched collisions; with a KV connector, it is the fingerprint of model and
    cache (`KVLayout.fingerprint`), so that equal engines agree.
    """

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        self.block_size = block_size
        key = secrets.token_bytes(32) if key is None else key
        self._keyed = blake2b(key=key, digest_size=DIGEST_BYTES)
        self.weights = ""
        """Identifies the weights that compute the KV; "": those of the start."""

    def extend(self, request: Request, num_blocks: int) -> None:
        """Extend `request.block_hashes` to `num_blocks` of known tokens."""
        hashes, size = request.block_hashes, self.block_size
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else self.root(request)
        tokens = request.known_tokens(len(hashes) * size, num_blocks * size)
        keyed, data, width = self._keyed, pack(f"{len(tokens)}q", *tokens), 8 * size
        late = self._late(request) if request.late_extra else {}
        for start in range(0, len(data), width):
            hasher = keyed.copy()
            hasher.update(parent + data[start : start + width])
            if late:
                hasher.update(late.get(len(hashes), b""))
            parent = hasher.digest()
            hashes.append(parent)

    def _late(self, request: Request) -> dict[int, bytes]:
        """Return the numbers of the blocks that have an entry of `Request.late_extra`, and what is
        added to them."""
        entries: dict[int, bytes] = {}
        for entry in request.late_extra:
            block = entry[0] // self.block_size
            entries[block] = entries.get(block, b"") + repr(entry).encode()
        return entries

    def root(self, request: Request) -> bytes:
        """Return the hash of a request's dependencies besides tokens."""
        depends_on: tuple[object, ...] = (
            request.cache_salt, request.cache_extra, request.private_salt
        )  # fmt: skip
        if self.weights:
            depends_on = (*depends_on, self.weights)
        return self._digest(repr(depends_on).encode())

    def _digest(self, data: bytes) -> bytes:
        hasher = self._keyed.copy()
        hasher.update(data)
        return hasher.digest()

"""Chained, keyed hashes of full blocks: equal hash, equal content and equal everything before it."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence

_KEY = os.urandom(32)
"""Drawn anew by each process, so that nobody can craft a collision or test for one offline."""


def root_hash(extra: Sequence[str]) -> bytes:
    """The parent of a sequence's first block; `extra` isolates tenants, adapters and images."""
    digest = hashlib.blake2b(key=_KEY, digest_size=16)
    for part in extra:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block that follows `parent`."""
    digest = hashlib.blake2b(parent, key=_KEY, digest_size=16)
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()

"""KV connectors: transfers in plans and results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ..step import PartPlan

NAME = "kv_transfer"


class TransferPlan(PartPlan, frozen=True):
    """What a plan carries from a connector's scheduler half to its worker half. A plan may have
    only this, or nothing at all, to fetch a report."""

    metadata: bytes
    """Encoded as the connector's `metadata_type`."""


class KVReport(msgspec.Struct, frozen=True):
    """Report on KV transfers, from a connector's worker half to the scheduler."""

    finished: tuple[int, ...] = ()
    """Transfers that have succeeded: their blocks are not read or written any more."""
    failed: dict[int, tuple[int, ...]] = {}
    """Transfers that have failed → the block ids that were not filled, of a load, or not stored, of
    a save. None given: all of the transfer's; a block that is in doubt belongs to them."""
    payload: Any = None
    """Data of the connector's own for its scheduler half, of its `payload_type`; in a `StepResult`,
    that encoded: bytes."""

    @staticmethod
    def merged(parts: Iterable[tuple[int, ...] | None]) -> tuple[int, ...] | None:
        """Return what parts of one transfer come to together, each None if it has succeeded, or its
        value in `failed`."""
        failed = [blocks for blocks in parts if blocks is not None]
        if not failed:
            return None
        if not all(failed):
            return ()
        return tuple(sorted({block_id for blocks in failed for block_id in blocks}))


class KVDetached(msgspec.Struct, frozen=True):
    """Reports that a KV connector's worker half has raised: only its `close` is called from then
    on."""

    failure: str
    """The exception, where it was raised, and the connector's provenance."""
    closed: bool | None = None
    """Whether it has closed, so that it reads and writes no block any more. None: it is still
    closing; False: `close` raised, and it may use blocks at any later time."""


class TransferResult(msgspec.Struct, frozen=True):
    """What a result carries from a connector's worker half to its scheduler half."""

    report: KVReport | None = None
    """KV transfers that have ended since the previous result."""
    detached: KVDetached | None = None
    """Set in every result after the worker half has raised, once its last report was delivered."""

"""Several connectors in order: the first with blocks loads them, all save."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from ...core.config import KVTransferConfig
from ...core.errors import ConfigError, PluginError
from ...core.parts.kv_transfer import KVReport
from ...core.protocols.kv import (
    KVCodec,
    KVConnector,
    KVConnectorScheduler,
    KVConnectorSetup,
    KVConnectorWorker,
    check_serves_compacted,
)
from ...core.request import Request
from .options import read_options


class MultiOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of multi."""

    connectors: Annotated[tuple[KVTransferConfig, ...], Meta(min_length=1)]
    """Each in the form of `kv_transfer_config`; its `kv_role` applies, its failure policy does
    not."""


class MultiMetadata(msgspec.Struct, frozen=True):
    shares: dict[int, int]
    """New transfer → number of connectors in it."""
    parts: tuple[bytes | None, ...]
    """[num_connectors] Each encoded as its connector's `metadata_type`."""


class MultiConnector:
    metadata_type = MultiMetadata
    compacted_caches = True
    payload_type = tuple[KVReport | None, ...]
    """[num_connectors] Each one's report, its payload encoded as its own `payload_type`."""

    @classmethod
    def make_scheduler(cls, setup: KVConnectorSetup) -> MultiScheduler:
        parts = [(part, _load(part)) for part in _parts(setup)]
        for part, loaded in parts if setup.compacts else ():
            check_serves_compacted(part.transfer.kv_connector, loaded)
        return MultiScheduler(
            [(part, loaded.make_scheduler(part), KVCodec(loaded)) for part, loaded in parts]
        )

    @classmethod
    def make_worker(cls, setup: KVConnectorSetup) -> MultiWorker:
        parts = [(part, _load(part)) for part in _parts(setup)]
        return MultiWorker([(loaded.make_worker(part), KVCodec(loaded)) for part, loaded in parts])


def _parts(setup: KVConnectorSetup) -> list[KVConnectorSetup]:
    options = read_options(setup.transfer.kv_connector_extra_config, MultiOptions)
    return [replace(setup, transfer=transfer) for transfer in options.connectors]


def _load(part: KVConnectorSetup) -> KVConnector:
    try:
        connector: KVConnector = part.plugins["kv_connector"].load(part.transfer.kv_connector)
        return connector
    except PluginError as error:
        raise ConfigError(
            f"kv_connector_extra_config.connectors: {error}", param="kv_transfer_config"
        ) from error


def _close(halves: Sequence[KVConnectorScheduler | KVConnectorWorker]) -> None:
    with contextlib.ExitStack() as closing:
        for half in reversed(halves):
            closing.callback(half.close)


class MultiScheduler:
    """Asks connectors in order, and tracks their transfers."""

    def __init__(
        self, parts: Sequence[tuple[KVConnectorSetup, KVConnectorScheduler, KVCodec]]
    ) -> None:
        self._halves = [half for _, half, _ in parts]
        self._codecs = [codec for _, _, codec in parts]
        self._loading = [setup.transfer.kv_role != "kv_producer" for setup, _, _ in parts]
        self._saving = [setup.transfer.kv_role != "kv_consumer" for setup, _, _ in parts]
        self._asking: dict[str, int] = {}
        """Request → the connector whose result is awaited."""
        self._chosen: dict[str, int] = {}
        self._shares: dict[int, int] = {}

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        request_id = request.request_id
        for number in range(self._asking.get(request_id, 0), len(self._halves)):
            if not self._loading[number]:
                continue
            count = self._halves[number].num_external_tokens(request, num_computed_tokens)
            if count is None:
                self._asking[request_id] = number
                return None
            if count:
                self._asking.pop(request_id, None)
                self._chosen[request_id] = number
                return count
        self._asking.pop(request_id, None)
        return 0

    def start_load(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Queue the load at the connector that promised it."""
        self._shares[transfer] = 1
        half = self._halves[self._chosen.pop(request.request_id)]
        half.start_load(transfer, request, keys, block_ids)

    def start_save(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> Sequence[int]:
        union: dict[int, None] = {}
        shares = 0
        for half, saving in zip(self._halves, self._saving, strict=True):
            accepted = half.start_save(transfer, request, keys, block_ids) if saving else ()
            shares += bool(accepted)
            union.update(dict.fromkeys(accepted))
        if shares:
            self._shares[transfer] = shares
        return list(union)

    def request_finished(
        self, transfer: int, request: Request
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold blocks if any connector does; return the first parameters."""
        self._asking.pop(request.request_id, None)
        self._chosen.pop(request.request_id, None)
        results = [half.request_finished(transfer, request) for half in self._halves]
        holders = sum(is_retained for is_retained, _ in results) if request.block_ids else 0
        if holders:
            self._shares[transfer] = holders
        return holders > 0, next((params for _, params in results if params), None)

    def build_metadata(self) -> MultiMetadata | None:
        parts = tuple(
            codec.encode_metadata(half.build_metadata())
            for half, codec in zip(self._halves, self._codecs, strict=True)
        )
        if not self._shares and all(part is None for part in parts):
            return None
        shares, self._shares = self._shares, {}
        return MultiMetadata(shares, parts)

    def update(self, report: KVReport) -> None:
        """Pass each connector its own worker half's report."""
        for half, codec, part in zip(self._halves, self._codecs, report.payload, strict=True):
            if part is not None:
                half.update(codec.decode_report(part))

    def close(self) -> None:
        """Close all, even if one raises."""
        _close(self._halves)


class MultiWorker:
    """Ends a transfer when all its connectors have."""

    def __init__(self, parts: Sequence[tuple[KVConnectorWorker, KVCodec]]) -> None:
        self._halves = [half for half, _ in parts]
        self._codecs = [codec for _, codec in parts]
        self._open: dict[int, int] = {}
        self._failed: dict[int, tuple[int, ...]] = {}

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        for half in self._halves:
            half.bind(kv_caches)

    def start(self, metadata: MultiMetadata) -> None:
        self._open.update(metadata.shares)
        for half, codec, part in zip(self._halves, self._codecs, metadata.parts, strict=True):
            if part is not None:
                half.start(codec.decode_metadata(part))

    def poll(self) -> KVReport | None:
        """Return the transfers that all connectors have ended, with each one's report."""
        parts = [half.poll() for half in self._halves]
        if all(part is None for part in parts):
            return None
        finished: list[int] = []
        failed: dict[int, tuple[int, ...]] = {}
        for part in parts:
            if part is None:
                continue
            for transfer, blocks in [*((t, None) for t in part.finished), *part.failed.items()]:
                unmoved = KVReport.merged((self._failed.pop(transfer, None), blocks))
                self._open[transfer] -= 1
                if self._open[transfer]:
                    if unmoved is not None:
                        self._failed[transfer] = unmoved
                    continue
                del self._open[transfer]
                if unmoved is None:
                    finished.append(transfer)
                else:
                    failed[transfer] = unmoved
        payloads = tuple(
            None if part is None else codec.encode_report(part)
            for part, codec in zip(parts, self._codecs, strict=True)
        )
        return KVReport(finished=tuple(finished), failed=failed, payload=payloads)

    def close(self) -> None:
        _close(self._halves)

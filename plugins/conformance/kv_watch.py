"""Stands between the engine and a KV connector: delays reports, spoils loads, and checks whether
blocks change while a transfer uses them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from ...core.config import KVTransferConfig
from ...core.hook_versions import API_VERSION
from ...core.hooks import hookimpl
from ...core.parts.kv_transfer import KVReport
from ...core.protocols.kv import (
    KVCodec,
    KVConnectorScheduler,
    KVConnectorSetup,
    KVConnectorWorker,
)
from ...core.request import Request

NAME = "conformance_watch"


class WatchMetadata(msgspec.Struct, frozen=True):
    """The connector's metadata, with what the watch knows of the transfers in it."""

    inner: bytes | None
    """Encoded as the connector's `metadata_type`."""
    loads: dict[int, list[int]]
    """Transfer → blocks."""
    saves: dict[int, list[int]]


class Watch:
    """Registers a watched connector: pass it to an engine as a plugin, with `NAME` as its
    connector."""

    jackfield_api = API_VERSION
    metadata_type = WatchMetadata
    payload_type = bytes
    """The connector's own payload, encoded."""

    def __init__(self, connector: str, extra_config: dict[str, Any]) -> None:
        self.inner = KVTransferConfig(
            kv_connector=connector, kv_connector_extra_config=extra_config
        )
        self.spoil: Callable[[int], float | None] = lambda transfer: None
        """Transfer of a load → share of its blocks that arrives; None: the load is unchanged."""
        self.violations: list[str] = []
        self.held_reports = 0
        """Number of reports held back."""
        self.num_loads = self.num_saves = 0
        self._open = threading.Event()
        self._open.set()
        self._notify: list[Callable[[], None]] = []

    @hookimpl
    def register_kv_connectors(self, registry: Any) -> None:
        """Register the watched connector under `NAME`."""
        registry.add(NAME, self)

    def hold_reports(self) -> None:
        """Hold back reports, so that the engine is not notified of any transfer's end."""
        self._open.clear()

    def let_reports_go(self) -> None:
        """Deliver all held reports."""
        self._open.set()
        for notify in self._notify:
            notify()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def make_scheduler(self, setup: KVConnectorSetup) -> WatchedScheduler:
        """Create the connector's scheduler half, with the watch around it."""
        setup, connector = self._of_inner(setup)
        return WatchedScheduler(self, connector.make_scheduler(setup), KVCodec(connector))

    def make_worker(self, setup: KVConnectorSetup) -> WatchedWorker:
        """Create the connector's worker half, with the watch around it."""
        self._notify.append(setup.notify)
        setup, connector = self._of_inner(setup)
        return WatchedWorker(self, connector.make_worker(setup), KVCodec(connector))

    def _of_inner(self, setup: KVConnectorSetup) -> tuple[KVConnectorSetup, Any]:
        inner_setup = KVConnectorSetup(
            transfer=self.inner, layout=setup.layout, plugins=setup.plugins, notify=setup.notify
        )
        return inner_setup, setup.plugins["kv_connector"].load(self.inner.kv_connector)


class _Noted:
    """Records every exception of the wrapped half: an engine would continue without the
    connector.
    """

    def __init__(self, watch: Watch, inner: Any) -> None:
        self._watch = watch
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            try:
                return method(*args)
            except Exception as error:
                message = f"{name} raises {type(error).__name__}: {error}"
                self._watch.violations.append(message)
                raise

        return call


class WatchedScheduler:
    """Passes every call on, and records which blocks a transfer uses."""

    def __init__(self, watch: Watch, inner: KVConnectorScheduler, codec: KVCodec) -> None:
        self._watch = watch
        self._codec = codec
        self._inner: KVConnectorScheduler = _Noted(watch, inner)
        self._loads: dict[int, list[int]] = {}
        self._saves: dict[int, list[int]] = {}

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        return self._inner.num_external_tokens(request, num_computed_tokens)

    def start_load(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        self._watch.num_loads += 1
        self._loads[transfer] = list(block_ids)
        self._inner.start_load(transfer, request, keys, block_ids)

    def start_save(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> Sequence[int]:
        accepted = self._inner.start_save(transfer, request, keys, block_ids)
        if not set(accepted) <= set(block_ids):
            self._watch.violations.append("start_save asks for blocks that it was not offered")
        if accepted:
            self._watch.num_saves += 1
            self._saves[transfer] = list(accepted)
        return accepted

    def request_finished(
        self, transfer: int, request: Request
    ) -> tuple[bool, dict[str, Any] | None]:
        is_saving, params = self._inner.request_finished(transfer, request)
        if is_saving and request.block_ids:
            self._saves[transfer] = list(request.block_ids)
        return is_saving, params

    def build_metadata(self) -> WatchMetadata | None:
        metadata = self._codec.encode_metadata(self._inner.build_metadata())
        loads, saves = self._loads, self._saves
        if metadata is None and not loads and not saves:
            return None
        self._loads, self._saves = {}, {}
        return WatchMetadata(metadata, loads, saves)

    def update(self, report: KVReport) -> None:
        self._inner.update(self._codec.decode_report(report))

    def close(self) -> None:
        self._inner.close()


class WatchedWorker:
    """Compares blocks: of a save from its start to its end, of a load from its arrival to its
    report to the engine."""

    def __init__(self, watch: Watch, inner: KVConnectorWorker, codec: KVCodec) -> None:
        self._watch = watch
        self._codec = codec
        self._inner: KVConnectorWorker = _Noted(watch, inner)
        self._loads: dict[int, list[int]] = {}
        self._seen: dict[int, tuple[list[int], list[torch.Tensor]]] = {}
        self._held: list[KVReport] = []
        self._ended: set[int] = set()

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        self._caches = list(kv_caches)
        self._inner.bind(kv_caches)

    def start(self, metadata: WatchMetadata) -> None:
        self._loads.update(metadata.loads)
        for transfer, block_ids in metadata.saves.items():
            self._seen[transfer] = block_ids, self._content(block_ids)
        if metadata.inner is not None:
            self._inner.start(self._codec.decode_metadata(metadata.inner))

    @torch.inference_mode()
    def poll(self) -> KVReport | None:
        report = self._inner.poll()
        if report is not None:
            report = self._judge(self._codec.encode_report(report))
            self._held.append(report)
            self._watch.held_reports += 1
        if not self._held or not self._watch.is_open:
            return None
        result = self._held.pop(0)
        self._watch.held_reports -= 1
        for transfer in (*result.finished, *result.failed):
            self._compare(transfer)
        if self._held:
            self._watch.let_reports_go()
        return result

    def close(self) -> None:
        self._inner.close()

    def _judge(self, report: KVReport) -> KVReport:
        failed = dict(report.failed)
        finished = []
        for transfer in (*report.finished, *report.failed):
            if transfer in self._ended:
                self._watch.violations.append(f"transfer {transfer} is ended twice")
            self._ended.add(transfer)
            block_ids = self._loads.pop(transfer, None)
            if block_ids is not None:
                share = self._watch.spoil(transfer)
                if share is not None:
                    lost = block_ids[int(share * len(block_ids)) :]
                    for cache in self._caches:
                        cache[:, lost] = torch.finfo(cache.dtype).max
                    parts = (failed.get(transfer), tuple(lost) or None)
                    if (unfilled := KVReport.merged(parts)) is not None:
                        failed[transfer] = unfilled
                self._seen[transfer] = block_ids, self._content(block_ids)
            if transfer not in failed:
                finished.append(transfer)
        return KVReport(finished=tuple(finished), failed=failed, payload=report.payload)

    def _compare(self, transfer: int) -> None:
        if transfer not in self._seen:
            self._watch.violations.append(f"transfer {transfer} is unknown")
            return
        block_ids, before = self._seen.pop(transfer)
        for was, now in zip(before, self._content(block_ids), strict=True):
            if not torch.equal(was, now):
                self._watch.violations.append(
                    f"blocks of transfer {transfer} were written while it used them"
                )
                return

    def _content(self, block_ids: list[int]) -> list[torch.Tensor]:
        return [cache[:, block_ids].view(torch.uint8).clone() for cache in self._caches]

"""KV transfer: a plan's metadata goes to the connector's worker half, its reports into results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...config import KVTransferConfig
from ...parts.kv_transfer import NAME, TransferPlan, TransferResult
from ...protocols.kv import KVCodec, KVConnectorSetup, KVLayout
from ...registration.failing_plugin import failing_plugin
from ...step import PartPlan
from ..kv_cache.layout import kv_layout
from .guarded_half import GuardedHalf
from .part import PartNeeds, PartSite, PartStart, Report, StartContext, WorkerPart


class KVTransferStart(PartStart):
    """Creates the worker half of the configured connector."""

    option = "kv_transfer_config"

    def __init__(self, start: StartContext, notify: Callable[[], None]) -> None:
        """notify: the half has something to report; called from any thread."""
        self._start = start
        self._notify = notify
        self._part = KVTransfer()
        self._caches: Sequence[Mapping[str, torch.Tensor]] = ()
        self.needs = PartNeeds()

    def make(self, site: PartSite) -> KVTransfer:
        """Return the part, which has no half yet."""
        return self._part

    def bind(self, caches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Keep the caches: [num_layers], of the one group that connectors support."""
        self._caches = caches

    def complete(self, num_blocks: int) -> Mapping[str, Any]:
        """Create the half and bind it to the caches. Return their layout."""
        start, transfer = self._start, self._start.config.kv_transfer_config
        assert transfer is not None, "the part is on"
        specs = [layer.cache_spec(start.kv_dtype) for layer in start.layers]
        layout = kv_layout(
            start.config, start.model_config, start.model, specs, num_blocks, start.device,
            start.ranks,
        )  # fmt: skip
        self._part.half = self._connected(transfer, layout)
        return {"kv_layout": layout}

    def _connected(self, transfer: KVTransferConfig, layout: KVLayout) -> GuardedHalf:
        start, plugins = self._start, self._start.plugins
        setup = KVConnectorSetup(
            transfer=transfer, layout=layout, plugins=plugins, notify=self._notify,
            compacts=start.config.compresses_kv, member=transfer.member,
        )  # fmt: skip
        connectors, name = plugins["kv_connector"], transfer.kv_connector
        connector = connectors.load(name)

        def who(error: BaseException) -> str:
            # The connector may consist of others (`multi`).
            return failing_plugin(plugins, error) or connectors.described(name)

        with connectors.calling(name, "its metadata_type"):
            codec = KVCodec(connector)
        with connectors.calling(name, "make_worker"):
            worker = connector.make_worker(setup)
        half = GuardedHalf(worker, codec, start.device, who, setup.notify)
        try:
            with connectors.calling(name, "bind"):
                half.bind([part for cache in self._caches for part in cache.values()])
        except BaseException:
            half.close()
            raise
        return half


class KVTransfer(WorkerPart):
    """Calls the connector's worker half, whose exceptions end no step."""

    name = NAME
    half: GuardedHalf
    """Set by `KVTransferStart.complete`, before any step."""

    def receive(self, part: PartPlan) -> None:
        """Pass on the metadata of a plan."""
        assert isinstance(part, TransferPlan)
        self.half.start(part.metadata)

    def poll(self) -> Report:
        """Collect what the half reports. If the step fails, it is kept for the next one."""
        self.half.poll()
        return self._news

    def _news(self) -> TransferResult | None:
        report, detached = self.half.news()
        if report is None and detached is None:
            return None
        return TransferResult(report, detached)

    def detach(self, failure: str) -> None:
        """Close the half, as that of another rank has raised."""
        self.half.detach(failure)

    def close(self) -> None:
        """Close the half and wait for it."""
        self.half.close()

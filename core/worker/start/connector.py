"""Creates the worker half of the KV connector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ...config import KVTransferConfig
from ...protocols.kv import KVCodec, KVConnectorSetup, KVLayout
from ...registration.failing_plugin import failing_plugin
from ...registry import Plugins
from ..guarded_half import GuardedHalf


def connect_half(
    transfer: KVTransferConfig,
    plugins: Plugins,
    layout: KVLayout,
    caches: Sequence[Mapping[str, torch.Tensor]],
    device: torch.device,
    notify: Callable[[], None],
    *,
    compacts: bool,
) -> GuardedHalf:
    """Return the half, bound to the caches: [num_layers], of the one group that connectors support.

    notify: the half has something to report; called from any thread. compacts: caches of requests
    are compacted.
    """
    setup = KVConnectorSetup(
        transfer=transfer, layout=layout, plugins=plugins, notify=notify, compacts=compacts
    )
    connectors = plugins["kv_connector"]
    name = transfer.kv_connector
    connector = connectors.load(name)

    def who(error: BaseException) -> str:
        # The connector may consist of others (`multi`).
        return failing_plugin(plugins, error) or connectors.described(name)

    with connectors.calling(name, "its metadata_type"):
        codec = KVCodec(connector)
    with connectors.calling(name, "make_worker"):
        worker = connector.make_worker(setup)
    half = GuardedHalf(worker, codec, device, who, setup.notify)
    try:
        with connectors.calling(name, "bind"):
            half.bind([part for cache in caches for part in cache.values()])
    except BaseException:
        half.close()
        raise
    return half

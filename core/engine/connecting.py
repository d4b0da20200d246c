"""Makes the scheduler half of a KV connector, and lets both halves wake the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ..config import EngineConfig
from ..errors import ConfigError
from ..protocols import Executor, ExecutorInfo, KVConnectorScheduler, KVConnectorSetup
from ..registry import Plugins


def watch_transfers(executor: Executor, callback: Callable[[], None]) -> None:
    """Raises ConfigError for an executor that knows no connectors."""
    watch = getattr(executor, "watch_transfers", None)
    if watch is None:
        raise ConfigError(
            f"kv_transfer_config: the executor {type(executor).__name__} serves no KV connectors",
            param="kv_transfer_config",
        )
    watch(callback)


def connect(
    config: EngineConfig, info: ExecutorInfo, plugins: Plugins, wake: Callable[[], None]
) -> KVConnectorScheduler | None:
    """The scheduler half, or None where no connector is configured. `wake`: on the event loop."""
    if config.kv_transfer_config is None:
        return None
    if info.kv_layout is None:
        raise ConfigError(
            "kv_transfer_config: the executor told no layout of its KV cache",
            param="kv_transfer_config",
        )
    loop = asyncio.get_running_loop()

    def notify() -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(wake)

    setup = KVConnectorSetup(
        transfer=config.kv_transfer_config, layout=info.kv_layout, plugins=plugins, notify=notify
    )
    name = config.kv_transfer_config.kv_connector
    connector = plugins["kv_connector"].load(name)
    with plugins["kv_connector"].calling(name, "make_scheduler"):
        half: KVConnectorScheduler = connector.make_scheduler(setup)
    return half

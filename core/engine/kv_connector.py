"""Creates the scheduler half of a KV connector, and lets both halves wake the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from ..config import EngineConfig
from ..errors import ConfigError
from ..protocols.executors import Executor, ExecutorInfo
from ..protocols.kv import (
    KVCodec,
    KVConnectorScheduler,
    KVConnectorSetup,
    check_serves_compacted,
)
from ..registration.failing_plugin import failing_plugin
from ..registry import Plugins
from ..scheduling.parts.guarded_connector import GuardedConnector


def numbered(config: EngineConfig, member: int) -> EngineConfig:
    """Return the configuration from which a connector's halves learn their engine's number.

    Raises ConfigError for a number that somebody else has set.
    """
    if (transfer := config.kv_transfer_config) is None:
        return config
    if transfer.member not in (0, member):
        raise ConfigError(
            f"kv_transfer_config: member: the engine sets it, got {transfer.member}; leave it out",
            param="kv_transfer_config",
        )
    transfer = msgspec.structs.replace(transfer, member=member)
    return msgspec.structs.replace(config, kv_transfer_config=transfer)


def watch_transfers(executor: Executor, callback: Callable[[], None]) -> None:
    """Call `callback` when transfers end. Raises ConfigError if the executor cannot."""
    try:
        executor.watch_transfers(callback)
    except NotImplementedError:
        raise ConfigError(
            f"kv_transfer_config: the executor {type(executor).__name__} serves no KV connectors",
            param="kv_transfer_config",
        ) from None


def connect(
    config: EngineConfig, info: ExecutorInfo, plugins: Plugins, wake: Callable[[], None]
) -> GuardedConnector | None:
    """Return the guarded scheduler half, or None without a connector.

    wake: called on the event loop.
    """
    if config.kv_transfer_config is None:
        return None
    if info.kv_layout is None:
        raise ConfigError(
            "kv_transfer_config: the executor reported no layout of its KV cache",
            param="kv_transfer_config",
        )
    loop = asyncio.get_running_loop()

    def notify() -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(wake)

    compacts = config.compresses_kv
    setup = KVConnectorSetup(
        transfer=config.kv_transfer_config, layout=info.kv_layout, plugins=plugins,
        compacts=compacts, notify=notify, member=config.kv_transfer_config.member,
    )  # fmt: skip
    name = config.kv_transfer_config.kv_connector
    connector = plugins["kv_connector"].load(name)
    if compacts:
        check_serves_compacted(name, connector)
    with plugins["kv_connector"].calling(name, "make_scheduler"):
        half: KVConnectorScheduler = connector.make_scheduler(setup)
    with plugins["kv_connector"].calling(name, "its metadata_type"):
        codec = KVCodec(connector)

    def plugin_of(error: BaseException) -> str:
        # The connector may consist of others (`multi`).
        return failing_plugin(plugins, error) or plugins["kv_connector"].described(name)

    return GuardedConnector(half, codec, plugin_of)

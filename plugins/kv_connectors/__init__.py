"""KV connectors that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_kv_connectors(registry: Any) -> None:
    registry.add("file_store", "jackfield.plugins.kv_connectors.file_store:FileStoreConnector")
    registry.add("cpu_offload", "jackfield.plugins.kv_connectors.cpu_offload:CpuOffloadConnector")
    registry.add(
        "device_offload", "jackfield.plugins.kv_connectors.device_offload:DeviceOffloadConnector"
    )
    registry.add("peer_store", "jackfield.plugins.kv_connectors.peer_store:PeerConnector")
    registry.add("multi", "jackfield.plugins.kv_connectors.multi:MultiConnector")

"""Every built-in KV connector under the kit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kv_peers import RecordedPeers, be_patient, reserved_address, secret_in

from jackfield.plugins.conformance.kv_connectors import KVConnectorKit


def damage(folder: Path) -> None:
    """Of the stored blocks: one cut off, one with a bit flipped, one of another key, the rest gone
    or no safetensors at all."""
    files = sorted(folder.rglob("*.safetensors"))
    assert files, "nothing was stored"
    whole = [file.read_bytes() for file in files]
    for number, file in enumerate(files):
        data = whole[number]
        kinds = [
            data[: len(data) // 2],
            data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
            whole[number - 1],
            b"",
            b"\xff" * 40,
        ]
        file.write_bytes(kinds[number % len(kinds)])


class TestFileStore(KVConnectorKit):
    name = "file_store"
    wrong_options = {"path": 3, "max_gib": 0}

    def extra_config(self, folder: Path) -> dict[str, Any]:
        return {"path": str(folder / "store"), "max_gib": 0.05}

    def damage(self, folder: Path) -> None:
        damage(folder)

    def break_far_side(self, folder: Path) -> None:
        damage(folder)


class TestCpuOffload(KVConnectorKit):
    name = "cpu_offload"
    wrong_options = {"kv_offloading_size": "all"}

    def extra_config(self, folder: Path) -> dict[str, Any]:
        return {"kv_offloading_size": 0.004}


class TestMulti(KVConnectorKit):
    name = "multi"
    wrong_options = {"connectors": [], "kv_offloading_size": 1}

    def extra_config(self, folder: Path) -> dict[str, Any]:
        small = {"kv_offloading_size": 0.004}
        stored = {"path": str(folder / "store")}
        return {
            "connectors": [
                {"kv_connector": "cpu_offload", "kv_connector_extra_config": small},
                {"kv_connector": "file_store", "kv_connector_extra_config": stored},
            ]
        }

    def damage(self, folder: Path) -> None:
        damage(folder)

    def break_far_side(self, folder: Path) -> None:
        damage(folder)


class TestPeerStore(KVConnectorKit):
    """Engines that are each other's peers, and their own."""

    name = RecordedPeers.name
    plugin = RecordedPeers()
    wrong_options = {
        "secret_file": "/no/such/file",
        "listen": "7100",
        "advertise": "somewhere",
        "peers": ["[::1]"],
        "size_gib": 1e-9,
    }

    @pytest.fixture(autouse=True)
    def _peers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        be_patient(monkeypatch)
        self.plugin.workers.clear()
        self.peers: list[str] = []

    def extra_config(self, folder: Path) -> dict[str, Any]:
        self.peers.insert(0, reserved_address())
        return {
            "secret_file": secret_in(folder),
            "listen": self.peers[0],
            "peers": list(self.peers),
            "size_gib": 0.01,
        }

    def damage(self, folder: Path) -> None:
        for worker in self.plugin.workers:
            blocks = worker._memory._blocks
            for number, (key, data) in enumerate(blocks.items()):
                at = len(data) - 5 if number % 2 else 100
                blocks[key] = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    def break_far_side(self, folder: Path) -> None:
        for worker in self.plugin.workers:
            assert worker._server is not None
            worker._server.close()

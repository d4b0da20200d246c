"""Engines that are KV peers of each other, for tests."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jackfield import hookimpl
from jackfield.core.protocols.kv import KVConnectorSetup
from jackfield.plugins.kv_connectors import peer_client, peer_server, peer_wire, store
from jackfield.plugins.kv_connectors.peer_store import PeerConnector, PeerWorker
from jackfield.plugins.kv_connectors.peer_wire import Address, Ask, Limit, PeerError

SECRET = b"sixteen bytes or more"


def reserved_port(number: int = 0) -> int:
    """A port of this host that the kernel gives to nobody who does not ask for it by number: the
    end of a connection keeps it for a minute, which hinders no server."""
    with socket.create_server(("127.0.0.1", number)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            connection, _ = listener.accept()
            connection.close()  # The side that closes first keeps the port.
            assert client.recv(1) == b""
        return int(listener.getsockname()[1])


def reserved_address() -> str:
    return f"127.0.0.1:{reserved_port()}"


def reserved_neighbours() -> tuple[str, str]:
    """Addresses with one port and the next."""
    while True:
        first = reserved_port()
        with contextlib.suppress(OSError, OverflowError):
            return f"127.0.0.1:{first}", f"127.0.0.1:{reserved_port(first + 1)}"


def secret_in(folder: Path, secret: bytes = SECRET) -> str:
    path = folder / f"secret-{secret[:4].hex()}"
    path.write_bytes(secret + b"\n")
    return str(path)


def be_patient(monkeypatch: pytest.MonkeyPatch, seconds: float = 300.0) -> None:
    """Let no time limit of peers pass on a machine that is busy."""
    for module in (peer_wire, peer_client, peer_server, store):
        monkeypatch.setattr(module, "ANSWER_SECONDS", seconds)
    for module in (peer_client, peer_server):
        monkeypatch.setattr(module, "HANDOVER_SECONDS", seconds)


class RecordedPeers:
    """The connector `peer_store` under a name of its own, which keeps its worker halves."""

    jackfield_api = 3
    name = "recorded_peer_store"

    def __init__(self, worker_class: type[PeerWorker] = PeerWorker) -> None:
        self.workers: list[Any] = []
        self._worker_class = worker_class

    @hookimpl
    def register_kv_connectors(self, registry: Any) -> None:
        recorded = self

        class Connector(PeerConnector):
            worker_class = self._worker_class

            @classmethod
            def make_worker(cls, setup: KVConnectorSetup) -> PeerWorker:
                worker = super().make_worker(setup)
                recorded.workers.append(worker)
                return worker

        registry.add(self.name, Connector)


@contextlib.contextmanager
def false_peer(
    answer: Callable[[socket.socket, Ask], None], fingerprint: bytes
) -> Iterator[Address]:
    """A peer that knows the secret, and answers as it likes; an OSError ends a connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, PeerError):
            peer_wire.admit(connection, SECRET, fingerprint)
            while True:
                answer(connection, peer_wire.receive_ask(connection, Limit(300)))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=serve, args=(connection,)))
                threads[-1].start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield Address(*listener.getsockname())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in threads:
            thread.join(300)

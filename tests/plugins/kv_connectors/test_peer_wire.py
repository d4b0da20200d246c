"""Servers and clients of KV blocks without an engine: strangers, and peers that fail or lie."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from kv_peers import SECRET, be_patient, false_peer, reserved_address
from test_builtin_connectors import LAYOUT, key

from jackfield.plugins.kv_connectors import peer_client, peer_server, peer_wire, store
from jackfield.plugins.kv_connectors.block_file import BlockFormat
from jackfield.plugins.kv_connectors.block_memory import BlockMemory
from jackfield.plugins.kv_connectors.peer_client import Peers
from jackfield.plugins.kv_connectors.peer_server import BlockServer
from jackfield.plugins.kv_connectors.peer_wire import Address, Ask, Limit

FORM = BlockFormat(LAYOUT)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


def block(number: int) -> bytes:
    return FORM.encode(key(number), memoryview(bytes([number]) * LAYOUT.block_bytes))


@contextlib.contextmanager
def served(
    *numbers: int, secret: bytes = SECRET, form: BlockFormat = FORM
) -> Iterator[tuple[Address, BlockMemory]]:
    """Blocks of these numbers at an address."""
    memory = BlockMemory(1 << 30)
    for number in numbers:
        memory.put(key(number), block(number))
    address = Address.read(reserved_address())
    server = BlockServer(address, secret, memory, form)
    server.start()
    try:
        yield address, memory
    finally:
        memory.close()
        server.close()


@contextlib.contextmanager
def peers_at(*addresses: Address, secret: bytes = SECRET) -> Iterator[Peers]:
    peers = Peers(addresses, secret, FORM)
    try:
        yield peers
    finally:
        peers.close()


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def test_what_one_peer_lacks_another_may_have() -> None:
    with served(1, 2, 5) as (first, _), served(3) as (second, _), served(4) as (third, _):
        with peers_at(first, second, third) as peers:
            wanted = keys(1, 2, 3, 4, 6)
            assert peers.count_present(wanted) == 4
            blocks = peers.get(wanted)
            assert [bytes(found[:1])[0] for found in blocks] == [1, 2, 3, 4]
            assert all(len(found) == LAYOUT.block_bytes for found in blocks)
            assert peers.count_present(keys(6, 1)) == 0 and peers.get(keys(6, 1)) == []


def test_many_keys_are_looked_up_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (peer_wire, peer_client):
        monkeypatch.setattr(module, "MAX_KEYS", 3)
    with served(*range(1, 9)) as (address, _), peers_at(address) as peers:
        assert peers.count_present(keys(*range(1, 10))) == 8
        assert peers.count_present(keys(1, 2, 3)) == 3
        assert peers.count_present(keys(1, 2, 9, 4)) == 2


def test_an_answer_has_as_many_blocks_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "MAX_ANSWER", 2 * FORM.encoded_bytes + 1)
    with served(1, 2, 3) as (address, _), peers_at(address) as peers:
        assert len(peers.get(keys(1, 2, 3))) == 2
        monkeypatch.setattr(peer_server, "MAX_ANSWER", 1)
        assert len(peers.get(keys(1, 2, 3))) == 1


def test_a_connection_that_has_ended_meanwhile_costs_nothing() -> None:
    """As a server does with those that are idle for long."""
    memory = BlockMemory(1 << 30)
    memory.put(key(1), block(1))
    address = Address.read(reserved_address())
    with peers_at(address) as peers:
        for _ in range(2):
            server = BlockServer(address, SECRET, memory, FORM)
            server.start()
            assert peers.count_present(keys(1)) == 1
            server.close()


@pytest.mark.parametrize("stranger", ["secret", "model"])
def test_a_peer_with_another_secret_or_model_is_left_alone(
    stranger: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PAUSE_SECONDS", 3600.0)
    layout = msgspec.structs.replace(LAYOUT, fingerprint=b"g" * 32)
    form = BlockFormat(layout) if stranger == "model" else FORM
    secret = b"another of sixteen" if stranger == "secret" else SECRET
    with served(1, form=form) as (address, memory), peers_at(address, secret=secret) as peers:
        asked: list[Any] = []
        monkeypatch.setattr(memory, "count_present", asked.append)
        monkeypatch.setattr(memory, "get", asked.append)
        for _ in range(2):
            assert peers.count_present(keys(1)) == 0 and peers.get(keys(1)) == []
        assert not asked
    expected = "another secret" if stranger == "secret" else "of no use here"
    warnings = [line for line in caplog.messages if f"the KV peer {address}" in line]
    assert len(warnings) == 1 and expected in warnings[0]


@pytest.mark.parametrize("proof", ["none", "of other nonces", "its own"])
def test_nobody_is_admitted_without_the_secret(proof: str) -> None:
    """Also by what was seen on another connection, or what the server says itself."""
    with served(1) as (address, _):
        limit = Limit(300)
        with socket.create_connection(address) as genuine:
            genuine.settimeout(300)
            theirs = bytes(peer_wire.receive(genuine, 48, limit))[16:]
            mine = bytes(32)
            said = mine + peer_wire.mac(SECRET, b"client", theirs, mine)
            genuine.sendall(said)
            answer = bytes(peer_wire.receive(genuine, 64, limit))
        with socket.create_connection(address) as connection:
            connection.settimeout(300)
            peer_wire.receive(connection, 48, limit)
            connection.sendall(
                {"none": bytes(64), "of other nonces": said, "its own": mine + answer[32:]}[proof]
            )
            assert connection.recv(1) == b""


@pytest.mark.parametrize("proof", ["none", "the client's"])
def test_a_server_without_the_secret_is_asked_nothing(proof: str) -> None:
    """It admits everybody, and would give false blocks."""
    heard: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(peer_wire.MAGIC + bytes(32))
            said = bytes(peer_wire.receive(connection, 64, Limit(300)))
            answer = bytes(32) if proof == "none" else said[32:]
            connection.sendall(LAYOUT.fingerprint + answer)
            heard.append(connection.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with peers_at(Address(*listener.getsockname())) as peers:
            assert peers.get(keys(1)) == []
        thread.join(300)
    assert heard == [b""]


GARBAGE = {
    "a length above the limit": b"\xff" * 4,
    "no MessagePack": (5).to_bytes(4, "little") + b"\xc1" * 5,
    "another object": (2).to_bytes(4, "little") + b"\x92\x01",
    "too many keys": None,
    "an unknown field": None,
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_ends_its_connection_alone(name: str) -> None:
    data = GARBAGE[name]
    if data is None:
        fields = {"keys": [b""] * 4097} if name == "too many keys" else {"keys": [], "more": 1}
        message = msgspec.msgpack.encode(fields)
        data = len(message).to_bytes(4, "little") + message
    with served(1) as (address, _), peers_at(address) as peers:
        assert peers.count_present(keys(1)) == 1
        with socket.create_connection(address) as connection:
            peer_wire.enter(connection, SECRET, LAYOUT.fingerprint, Limit(300))
            connection.sendall(data)
            assert connection.recv(1) == b""
        with socket.create_connection(address) as connection:
            connection.settimeout(300)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a".ljust(60) + b"\r\n\r\n")
            peer_wire.receive(connection, 48, Limit(300))
            assert connection.recv(1) == b""
        assert peers.count_present(keys(1)) == 1


def test_connections_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "MAX_CONNECTIONS", 2)
    with served(1) as (address, _), contextlib.ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(socket.create_connection(address))
            peer_wire.enter(connection, SECRET, LAYOUT.fingerprint, Limit(300))
        with socket.create_connection(address) as refused:
            refused.settimeout(300)
            assert refused.recv(1) == b""


def test_silence_ends_a_connection_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after the handshake, and in the middle of a question."""
    for module in (peer_wire, peer_server):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.2)
    with served(1) as (address, _):
        with socket.create_connection(address) as silent:
            silent.settimeout(300)
            silent.recv(48)
            assert silent.recv(1) == b""
        monkeypatch.setattr(peer_server, "IDLE_SECONDS", 0.2)
        monkeypatch.setattr(peer_wire, "ANSWER_SECONDS", 300.0)
        for data in (b"", b"\x09\x00\x00\x00"):
            with socket.create_connection(address) as idle:
                peer_wire.enter(idle, SECRET, LAYOUT.fingerprint, Limit(300))
                monkeypatch.setattr(peer_wire, "ANSWER_SECONDS", 0.2)
                idle.settimeout(300)
                with contextlib.suppress(ConnectionError):  # It has ended before the data came.
                    idle.sendall(data)
                    assert idle.recv(1) == b""
            monkeypatch.setattr(peer_wire, "ANSWER_SECONDS", 300.0)


# ---------------------------------------------------------------- peers that fail or lie


def dies(connection: socket.socket, ask: Ask) -> None:
    if not ask.content:
        connection.sendall(peer_wire.encode_count(len(ask.keys)))
        return
    connection.sendall(peer_wire.encode_count(len(ask.keys)) + block(1)[:100])
    raise OSError("it dies")


def counts_too_many(connection: socket.socket, ask: Ask) -> None:
    connection.sendall(peer_wire.encode_count(len(ask.keys) + 1))


def sends_others(connection: socket.socket, ask: Ask) -> None:
    if ask.damaged:
        connection.sendall(peer_wire.encode_count(0))
        return
    connection.sendall(peer_wire.encode_count(len(ask.keys)))
    for _ in ask.keys if ask.content else ():
        connection.sendall(block(77))


@pytest.mark.parametrize("lie", [dies, counts_too_many, sends_others])
def test_a_peer_that_lies_or_dies_is_left_alone_and_another_is_asked(
    lie: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "PAUSE_SECONDS", 3600.0)
    asks: list[Ask] = []

    def answer(connection: socket.socket, ask: Ask) -> None:
        asks.append(ask)
        lie(connection, ask)

    with served(1, 2) as (good, _), false_peer(answer, LAYOUT.fingerprint) as bad:
        with peers_at(bad, good) as peers:
            peers.count_present(keys(1, 2))
            assert [bytes(b[:1])[0] for b in peers.get(keys(1, 2))] == [1, 2]
            num_asks = len(asks)
            assert peers.count_present(keys(1, 2)) == 2 and len(asks) == num_asks
    assert sum(f"the KV peer {bad}" in line for line in caplog.messages) == 1


def test_a_peer_that_hangs_costs_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PAUSE_SECONDS", 3600.0)
    asks: list[Ask] = []
    go_on = threading.Event()

    def hang(connection: socket.socket, ask: Ask) -> None:
        asks.append(ask)
        go_on.wait(300)
        raise OSError("the end")

    with false_peer(hang, LAYOUT.fingerprint) as bad, peers_at(bad) as peers:
        monkeypatch.setattr(peer_client, "ANSWER_SECONDS", 0.5)
        assert peers.get(keys(1)) == [] and peers.get(keys(1)) == []
        assert len(asks) <= 1
        go_on.set()


# ---------------------------------------------------------------- memory


def test_memory_keeps_its_limit_and_drops_what_was_not_used_for_longest() -> None:
    memory = BlockMemory(limit=100)
    for number in range(1, 11):
        memory.put(key(number), bytes(10))
    assert memory.count_present(keys(1, 2, 3, 99)) == 3
    memory.put(key(11), bytes(30))
    assert memory.count_present(keys(4)) == memory.count_present(keys(6)) == 0
    assert memory.count_present(keys(7)) == 1 and memory.count_present(keys(1, 2, 3)) == 3
    memory.put(key(12), bytes(101))
    assert memory.get(key(12)) is None, "more than it may hold"
    memory.put(key(11), bytes(10))
    memory.put(key(13), bytes(20))
    assert memory.count_present(keys(7)) == 1, "a block that is put again counts once"
    memory.close()
    memory.put(key(1), b"late")
    assert memory.count_present(keys(1)) == 0

"""Greetings of ranks of other hosts, and the executor `ray` without a cluster."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import threading
import warnings
from typing import Any

import pytest

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.parallel.join import listen
from jackfield.core.registration.executor_choice import choose_executor
from jackfield.core.registry import load_plugins
from jackfield.plugins.executors.connections import (
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    NotLetIn,
    Reception,
    connect,
)
from jackfield.plugins.executors.ray.cluster import describe_ending


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it; one that it had not accepted yet is reset."""
    connection.settimeout(120)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_only_ranks_that_know_the_secret_are_let_in(caplog: pytest.LogCaptureFixture) -> None:
    """Others do not hold up those that do: a silent one, wrong ones, a number that is taken."""

    async def receive() -> list[bytes]:
        reception = Reception(listen(), range(1, 3))
        address, secret = reception.address, reception.secret
        silent = socket.create_connection(address)
        ranks = [await asyncio.to_thread(connect, address, secret, rank) for rank in (2, 1)]
        for greeting in ((bytes(32), 1), (secret, 0), (secret, 3), (secret, 2)):
            with pytest.raises(NotLetIn, match=r"has another secret.* or has no place"):
                await asyncio.to_thread(connect, address, *greeting)
        await asyncio.gather(*reception.connections.values())
        received = []
        for rank in (1, 2):
            own = reception.take(rank)
            await asyncio.get_running_loop().sock_sendall(own, b"%d" % rank)
            received.append(ranks[2 - rank].recv(1))
            own.close()
        # All others are closed, at the latest with the reception.
        await reception.close()
        assert is_closed(silent)
        for each in (silent, *ranks):
            each.close()
        with pytest.raises(OSError):
            socket.create_connection(address, timeout=1)
        return received

    assert asyncio.run(receive()) == [b"1", b"2"]
    assert "is not of a rank" in caplog.text


@pytest.mark.parametrize("turns", range(6))
def test_one_that_is_accepted_just_when_the_reception_closes_is_closed_too(turns: int) -> None:
    async def receive() -> bool:
        reception = Reception(listen(), range(1, 3))
        await asyncio.sleep(0)
        with socket.create_connection(reception.address) as late:
            for _ in range(turns):
                await asyncio.sleep(0)
            await reception.close()
            return is_closed(late)

    with warnings.catch_warnings(record=True) as left_to_the_collector:
        warnings.simplefilter("always", ResourceWarning)
        assert asyncio.run(receive())
        gc.collect()
    assert not left_to_the_collector


def test_a_connection_that_is_not_taken_is_closed() -> None:
    async def receive() -> None:
        reception = Reception(listen(), range(1, 3))
        rank = await asyncio.to_thread(connect, reception.address, reception.secret, 1)
        await reception.connections[1]
        await reception.close()
        rank.settimeout(120)
        assert rank.recv(1) == b""
        rank.close()

    asyncio.run(receive())


def test_a_greeting_that_never_ends_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackfield.plugins.executors.connections.GREETING_SECONDS", 0.1)

    async def receive() -> bytes:
        reception = Reception(listen(), range(1, 2))
        slow = socket.create_connection(reception.address)
        slow.sendall(bytes(GREETING.size - 1))
        slow.settimeout(120)
        closed = await asyncio.to_thread(slow.recv, 1)
        await reception.close()
        slow.close()
        return closed

    assert asyncio.run(receive()) == b""


def test_a_rank_trusts_only_who_knows_the_secret_itself() -> None:
    """A listener that takes any greeting gets nothing from which to learn the secret."""
    with listen() as listener:

        def take_any() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(GREETING.size)
                connection.sendall(bytes(NONCE_BYTES))
                heard.append(connection.recv(PROOF_BYTES))
                connection.sendall(heard[0])

        heard: list[bytes] = []
        impostor = threading.Thread(target=take_any)
        impostor.start()
        with pytest.raises(NotLetIn, match="does not know the secret"):
            connect(listener.getsockname()[:2], b"0123456789abcdef", 1)
        impostor.join()
    assert len(heard[0]) == PROOF_BYTES and b"0123456789abcdef" not in heard[0]


def start(**options: Any) -> None:
    async def enter() -> None:
        async with AsyncEngine(EngineConfig(device="cpu", executor="ray", **options)):
            pass

    asyncio.run(enter())


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install ray") as refusal:
        start()
    assert refusal.value.param == "executor"


@pytest.mark.parametrize(
    ("address", "reason"),
    [("127.0.0.1:9", "ray start --head"), ("ray://127.0.0.1:10001", "is a Ray client's")],
)
def test_without_a_cluster_it_says_what_to_start(
    monkeypatch: pytest.MonkeyPatch, address: str, reason: str
) -> None:
    pytest.importorskip("ray", reason="needs the package ray, which the extra `test` has")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=reason) as refusal:
        start()
    assert refusal.value.param == "executor"


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_auto_never_chooses_it(ranks: int) -> None:
    config = EngineConfig(device="cpu", tensor_parallel_size=ranks)
    assert choose_executor(config, load_plugins()["executor"]) != "ray"


def test_the_end_of_an_actor_is_told_in_one_line() -> None:
    """As of Ray 2.60, for an actor whose process was killed."""
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: RankActor\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
        "Worker exit detail: End of file. Some common causes include: (1) the process was killed"
    )
    assert describe_ending(RuntimeError(text)) == (
        "is gone: The actor is dead because its worker process has died. Worker exit type: "
        "SYSTEM_ERROR Worker exit detail: End of file"
    )
    raised = RuntimeError("wrapped")
    raised.cause = OSError("no route")  # type: ignore[attr-defined]
    assert describe_ending(raised) == "failed: OSError: no route"
    assert describe_ending(None) == "ended"

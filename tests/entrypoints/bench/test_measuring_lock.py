"""A lock file: engines start without it, measure with it, and leave it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.entrypoints.bench.command import run
from jackfield.entrypoints.bench.engine.session import Session
from jackfield.entrypoints.bench.measuring_lock import held, held_async
from jackfield.entrypoints.bench.serve import command
from jackfield.entrypoints.bench.serve.command import ServeBench
from jackfield.entrypoints.bench.serve.load import Target


def is_free(path: Path) -> bool:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], list[bool]]:
    """Notes whether the lock is free whenever a method is called."""

    def watch(kind: type, name: str) -> list[bool]:
        states: list[bool] = []
        method = getattr(kind, name)

        def watched(*arguments: Any) -> Any:
            states.append(is_free(tmp_path / "lock"))
            return method(*arguments)

        monkeypatch.setattr(kind, name, watched)
        return states

    return watch


def test_an_engine_starts_without_the_lock_and_measures_with_it(
    tmp_path: Path, seen: Callable[[type, str], list[bool]]
) -> None:
    starting, measuring = seen(Session, "_start"), seen(Session, "_measure_all")
    status = run(
        ["run", "W1", "--scale", "0.02", "--repeats", "1", "--device", "cpu", "--ceilings", "none",
         "--attention-backend", "torch", "--lock-file", str(tmp_path / "lock"),
         "--output", str(tmp_path / "lines")]
    )  # fmt: skip
    assert (status, starting, measuring) == (0, [True], [False])
    assert is_free(tmp_path / "lock")


def test_a_server_is_measured_with_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: Callable[[type, str], list[bool]]
) -> None:
    """Without a server: what is sent to it is not of interest here."""

    async def nothing(*_: Any) -> None:
        return None

    @contextlib.asynccontextmanager
    async def server(bench: ServeBench) -> Any:
        started.append(is_free(tmp_path / "lock"))
        yield Target(url="", model=""), {}

    started: list[bool] = []
    monkeypatch.setattr(ServeBench, "_server", server)
    monkeypatch.setattr(ServeBench, "_measure", nothing)
    measuring = seen(ServeBench, "_measure")
    options = ["--lock-file", str(tmp_path / "lock"), "--output", str(tmp_path / "lines")]
    assert command.run(options) == 0
    assert (started, measuring) == ([True], [False]) and is_free(tmp_path / "lock")


def test_one_waits_until_the_other_has_left(tmp_path: Path) -> None:
    lock, order = str(tmp_path / "lock"), []

    async def other() -> None:
        async with held_async(lock):
            order.append("second")

    async def both() -> None:
        with held(lock):
            waiting = asyncio.create_task(other())
            await asyncio.sleep(0.1)
            order.append("first")
        await waiting

    asyncio.run(both())
    assert order == ["first", "second"]


def test_no_lock_is_needed() -> None:
    with held(None):
        pass

"""How processes of an engine begin."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from jackfield.core.remote.processes import SIGNALS, spawn

PROGRAM = """
import os, signal, socket, sys
from jackfield.core.remote.processes import SIGNALS, follow_parent

connection = socket.socket(fileno=int(sys.argv[1]))
connection.send(b"begun")
connection.recv(9)
follow_parent(int(sys.argv[2]))
for number in SIGNALS:
    os.kill(os.getpid(), number)
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
connection.send(repr(sorted(blocked)).encode())
"""


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_process_ignores_signals_of_terminals_from_its_first_moment(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "begins.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    own, other = socket.socketpair()
    with own:
        with other:
            process = spawn("begins", (other.fileno(),))
        os.kill(process.pid, number)  # Before its interpreter has begun.
        assert own.recv(9) == b"begun"
        os.kill(process.pid, number)
        own.send(b"go on")
        assert own.recv(99) == b"[]", "it has blocked signals for good"
        assert process.wait(60) == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint(SIGNALS)

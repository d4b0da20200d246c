"""Commands whose output no one reads, or that cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import forked
import pytest

from jackfield.entrypoints.stdout import INTERRUPTED, READER_LEFT

MAIN = (sys.executable, "-m", "jackfield.entrypoints.cli.main")


def finish(command: Sequence[str], stdout: IO[bytes] | int) -> tuple[int, str]:
    """Run a command with this standard output, buffered: its status, and its standard error."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    completed = forked.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, check=False,
        env=environment,
    )  # fmt: skip
    return completed.returncode, completed.stderr


@pytest.mark.parametrize(
    "command",
    [
        "--help", "serve --help", "plugins --no-check",
        *(
            pytest.param(command, marks=pytest.mark.slow)
            for command in ("--version", "bench --help", "plugins --no-check --json")
        ),
    ],
)  # fmt: skip
def test_a_command_whose_reader_has_left_ends_without_a_word(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert finish([*MAIN, *command.split()], writer) == (READER_LEFT, "")
    finally:
        os.close(writer)


@pytest.mark.parametrize("flag", ["--help", "--version"], ids=["long", "short"])
def test_a_full_disk_is_reported_in_one_line(flag: str) -> None:
    with open("/dev/full", "wb") as full:
        status, errors = finish([*MAIN, flag], full)
    assert status == 1
    assert errors == "jackfield: standard output cannot be written: No space left on device\n"


def test_standard_output_may_be_closed(tmp_path: Path) -> None:
    """Then `sys.stdout` is None, and the next file that is opened would be descriptor 1."""
    completed = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *MAIN, "plugins", "--no-check"],
        stderr=subprocess.PIPE, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert (completed.returncode, completed.stderr) == (0, "")


STOPPED = """
from jackfield.entrypoints.stdout import run_command

def interrupted():
    raise KeyboardInterrupt

raise SystemExit(run_command(interrupted))
"""


def test_ctrl_c_leaves_no_traceback() -> None:
    assert finish([sys.executable, "-c", STOPPED], subprocess.DEVNULL) == (INTERRUPTED, "")


def test_a_broken_pipe_of_something_else_is_not_hidden() -> None:
    program = (
        "from jackfield.entrypoints.stdout import run_command\n"
        "def fails(): raise BrokenPipeError('of a socket')\n"
        "run_command(fails)\n"
    )
    status, errors = finish([sys.executable, "-c", program], subprocess.PIPE)
    assert status == 1 and "of a socket" in errors


def test_a_server_serves_on_without_a_reader_and_drains() -> None:
    command = [*MAIN, "serve", "--port", "0", "--device", "cpu", "--num-gpu-blocks-override", "64"]
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as gone:
        assert gone.stdin is not None
        gone.wait()
        with forked.Popen(
            [*command, "--log-level", "info"],
            stdout=gone.stdin, stderr=subprocess.PIPE, text=True,
        ) as server:  # fmt: skip
            assert server.stderr is not None
            for line in server.stderr:
                if "ready in" in line:
                    break
            server.send_signal(signal.SIGTERM)
            errors = server.communicate(timeout=300)[1]
    assert (server.returncode, "Broken pipe" in errors) == (0, False), errors

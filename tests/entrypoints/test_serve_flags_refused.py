"""Wrong values of `jackfield serve`'s flags: refused by the flag's name, before anything starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from jackfield.entrypoints.cli.main import main


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        (["--port", "99999"], "argument --port: must be at most 65535, got 99999"),
        (["--port", "-1"], "argument --port: must be at least 0, got -1"),
        (["--port", "http"], "argument --port: must be a whole number, got 'http'"),
        (["--limit-concurrency", "x"], "--limit-concurrency: must be a whole number, got 'x'"),
        (["--max-body-bytes", "0"], "argument --max-body-bytes: must be at least 1, got 0"),
        (["--max-stored-responses", "-1"], "--max-stored-responses: must be at least 0, got -1"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout: must be a number of seconds, got"),
        (["--hf-overrides", "{bad"], "--hf-overrides: no JSON: Expecting property name"),
        (["--batch-dir", ""], "argument --batch-dir: must not be empty"),
        (
            ["--structured-outputs-config", "5", "--structured-outputs-config.backend", "xgrammar"],
            "--structured-outputs-config: must be a JSON object, got 5",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_the_flag_s_name(
    flags: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["serve", "/no/such/checkpoint", *flags])
    except SystemExit as stopped:
        status = int(str(stopped.code))
    assert status == 2
    assert output in capsys.readouterr().err


def test_a_port_in_use_is_reported_before_a_model_is_looked_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["serve", "/no/such/checkpoint", "--port", str(port)]) == 2
    output = capsys.readouterr().err
    assert f"--port: cannot listen at 127.0.0.1:{port}: [Errno" in output
    assert "Address already in use" in output


@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")])
def test_a_unix_socket_of_a_running_server_is_not_taken_from_it(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert main(["serve", "/no/such/checkpoint", "--uds", str(path), *flags]) == 2
        assert path.is_socket()
    assert f"--uds: cannot listen at {path}: a server listens there" in capsys.readouterr().err
    assert main(["serve", "/no/such/checkpoint", "--uds", str(path), *flags]) == 2
    assert "/no/such/checkpoint" in capsys.readouterr().err


def test_a_server_that_accepts_no_one_keeps_its_unix_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(path))
        listener.listen(0)
        client.connect(str(path))  # Another one would wait.
        assert main(["serve", "/no/such/checkpoint", "--uds", str(path)]) == 2
    assert f"--uds: cannot listen at {path}: a server listens there" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    assert main(["serve", "/no/such/checkpoint", "--uds", str(tmp_path / "socket")]) == 2
    assert "its folder cannot be written to" in capsys.readouterr().err


def test_what_can_be_no_unix_socket_is_reported_by_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone")
    for name, reason in (
        ("file", "it exists, and is no socket"),
        ("link", "it exists, and is no socket"),
        ("x" * 120, "path too long"),
    ):
        assert main(["serve", "/no/such/checkpoint", "--uds", str(tmp_path / name)]) == 2
        output = capsys.readouterr().err
        assert "--uds: cannot listen at" in output and reason in output


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        (["--host", "no.such.invalid"], "--host: cannot listen at no.such.invalid:8000: "),
        (["--uds", "/no/such/folder/socket"], "--uds: there is no folder for /no/such/folder"),
    ],
)
def test_a_missing_path_is_reported_by_its_flag(
    flags: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/no/such/checkpoint", *flags]) == 2
    assert output in capsys.readouterr().err

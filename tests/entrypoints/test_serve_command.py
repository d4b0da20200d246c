"""`jackfield serve` as a process, and the clients `jackfield chat` and `jackfield complete`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import forked
import httpx
import pytest
from serving import SCRIPT, running, save_random, save_scripted
from serving import engine_config as config

from jackfield.entrypoints.cli.main import main

MAIN = ("-m", "jackfield.entrypoints.cli.main")
LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 64, "stream": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


@contextlib.contextmanager
def serving(
    checkpoint: Path,
    *flags: str,
    module: tuple[str, str] = MAIN,
    start: type[subprocess.Popen[str]] = forked.Popen,
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server process on a free port: (process, its first line, its URL)."""
    process = start(
        [sys.executable, *module, "serve", str(checkpoint),
         "--port", "0", "--served-model-name", "tiny", "--device", "cpu", "--dtype", "float32",
         "--attention-backend", "torch", "--max-model-len", "512",
         "--num-gpu-blocks-override", "200", "--max-num-seqs", "8",
         *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert match is not None, process.communicate()[1]
        yield process, line, match[0]
    finally:
        process.kill()
        process.wait()


def test_the_ready_line_tells_what_is_served_and_where(checkpoint: Path) -> None:
    options = (
        "--attention-backend", "torch", "--tool-call-parser", "qwen25",
        # As vLLM's command lines have them.
        "-O3", "--compilation-config.level", "3", "--nnodes", "1", "--disable-prefix-caching",
    )  # fmt: skip
    with serving(checkpoint, *options) as (process, line, url):
        assert re.match(
            r"Serving tiny on http://127\.0\.0\.1:[1-9]\d* \(cpu, attention: torch, .+; "
            r"200 KV blocks; calls: hermes\), ready in \d+\.\d s\n",
            line,
        )
        assert httpx.get(url + "/v1/models").json()["data"][0]["id"] == "tiny"
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0


SLOW_LOADER = """
import sys, time
from jackfield import hookimpl

class Slow:
    extra_config = ()

    def __init__(self, config, model_config):
        pass

    def load(self, model, device):
        sys.stderr.write("loading\\n")  # At once, as other ranks write, too.
        sys.stderr.flush()
        time.sleep(3600)

@hookimpl
def register_weight_loaders(registry):
    registry.add("slow", "slow_loader:Slow")
"""


@pytest.fixture
def slow_loader(tmp_path: Path) -> dict[str, str]:
    """An environment with a plugin whose weight loader does not end."""
    facts = tmp_path / "slow_loader-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-loader\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[jackfield]\nslow-loader = slow_loader\n")
    (tmp_path / "slow_loader.py").write_text(SLOW_LOADER)
    return {**os.environ, "PYTHONPATH": forked.python_path(tmp_path)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "flags",
    [(), ("--api-server-count", "2"), ("--tensor-parallel-size", "2", "--device", "cpu")],
    ids=["one process", "fronts", "ranks"],
)
def test_a_signal_ends_a_server_that_is_loading(
    checkpoint: Path, slow_loader: dict[str, str], flags: tuple[str, ...], number: signal.Signals
) -> None:
    start = forked.Tree if flags else forked.Popen
    command = [
        sys.executable, *MAIN, "serve", str(checkpoint), "--port", "0", "--load-format", "slow",
        *flags,
    ]  # fmt: skip
    with start(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=slow_loader
    ) as process:
        assert process.stderr is not None
        assert any(line == "loading\n" for line in process.stderr)
        process.send_signal(number)
        stdout, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name} before the server was up" in errors
    assert "Traceback" not in errors and stdout == ""


def test_a_second_signal_cuts_off_what_still_runs(checkpoint: Path) -> None:
    with serving(checkpoint, "--shutdown-timeout", "300") as (process, _, url):
        with httpx.stream("POST", url + "/v1/completions", json=LONG, timeout=300) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            assert process.stdout.readline() == "Draining\n"
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        reasons = {
            choice["finish_reason"]
            for line in rest[:-1]
            for choice in json.loads(line.removeprefix("data: "))["choices"]
        }
        assert "abort" in reasons
        assert process.wait(300) == 0


CYCLE = """
import sys
from jackfield.entrypoints.cli.main import main

class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self, write=sys.__stderr__.write):
        write("collected\\n")

held = Cycle()
sys.exit(main(sys.argv[1:]))
"""


def test_what_was_there_before_the_first_request_is_collected_at_exit(checkpoint: Path) -> None:
    """Otherwise native modules tell of leaks at each stop."""
    with serving(checkpoint, module=("-c", CYCLE), start=subprocess.Popen) as (process, _, _):
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0 and "collected" in errors.splitlines()


def test_the_drain_ends_at_its_timeout(checkpoint: Path) -> None:
    with serving(checkpoint, "--shutdown-timeout", "0.05") as (process, _, url):
        with httpx.stream("POST", url + "/v1/completions", json=LONG, timeout=300) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and any('"abort"' in line for line in rest)
        assert process.wait(300) == 0


def test_chat_and_complete_talk_to_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(SCRIPT)
    with running(config(save_scripted(tmp_path))) as server:
        assert main(["chat", "--url", server.url, "-m", "hi", "--temperature", "0"]) == 0
        assert capsys.readouterr().out == text + "\n"
        flags = ["--url", server.url, "--temperature", "0", "--max-tokens", "4"]
        assert main(["complete", *flags, "assistant\n"]) == 0
        assert capsys.readouterr().out == "".join(SCRIPT[:4]) + "\n"
        assert main(["complete", *flags, "--model", "other", "x"]) == 1
        assert "'other' is not served here" in capsys.readouterr().err


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
CHUNK = b'data: {"choices": [{"delta": {"content": "Hel"}, "text": "Hel"}]}\n\n'
BROKEN = "jackfield: the response broke off"
FOREIGN = "does not speak OpenAI's protocol"


@contextlib.contextmanager
def answering(response: bytes) -> Iterator[str]:
    """A server that sends these bytes to its one client, and is gone: its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                received = b""
                while b"}" not in received.partition(b"\r\n\r\n")[2]:
                    received += connection.recv(1 << 16)
                connection.sendall(response)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("command", [("chat", "-m", "hi"), ("complete", "hi")], ids=" ".join)
@pytest.mark.parametrize(
    ("response", "shown", "says"),
    [
        (HEAD + b"Content-Length: 999\r\n\r\n" + CHUNK, "Hel\n", BROKEN),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n41\r\n" + CHUNK + b"\r\n9", "Hel\n", BROKEN),
        (HEAD + b"\r\n" + CHUNK, "Hel\n", BROKEN),
        (HEAD + b"\r\n<html></html>", "", FOREIGN),
        (HEAD + b'\r\n{"choices": 5}', "", FOREIGN),
        (HEAD + b"\r\n\xff\xfe", "", FOREIGN),
        (b"220 mail.example ESMTP\r\n", "", FOREIGN),
        (b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": "oops"}', "", "refused: HTTP Error 400"),
    ],
)  # fmt: skip
def test_a_response_that_cannot_be_used_is_explained(
    command: tuple[str, ...],
    response: bytes,
    shown: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with answering(response) as url:
        assert main([command[0], "--url", url, *command[1:]]) == 1
    output = capsys.readouterr()
    assert output.out == shown and says in output.err
    assert len(output.err.splitlines()) == 1


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from jackfield.entrypoints.cli.main import main; main([{!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    completed = subprocess.run([sys.executable, "-c", code.format("--help")], capture_output=True)
    assert completed.returncode == 0

"""`jackfield chat` as a person meets it: on a terminal (a pty), with a server that streams."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import stat
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from serving import Server, running, save_random
from serving import engine_config as config

from jackfield.entrypoints.cli.main import main

SECONDS = 120
"""After which a test that waits in vain fails."""
LAUNCH = (
    "import fcntl, sys, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "from jackfield.entrypoints.cli.main import main\nsys.exit(main(sys.argv[1:]))"
)


class Scripted(ThreadingHTTPServer):
    """Answers chats by their last message, and keeps their bodies."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.left = threading.Event()
        """Set once a client has closed its connection within a response."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        text = body["messages"][-1]["content"]
        if text == "refuse":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "max_tokens: too many"}}')
            return
        self.send_response(200)
        self.end_headers()
        if text == "think":
            self._send({"reasoning_content": "so it is"})
        if text == "hostile":
            self._send({"content": "red \x1b[31m\x07"})
        self._send({"content": f"echo {text}"})
        if text == "long":
            self.connection.recv(1)  # Returns once the client leaves.
            self.server.left.set()
            return
        usage = {"completion_tokens": 7}
        self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, delta: dict[str, str]) -> None:
        self.wfile.write(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master, self._seen = process, master, ""

    def expect(self, text: str) -> str:
        """Wait for a text; return what came before it."""
        while text not in self._seen:
            ready, _, _ = select.select([self._master], [], [], SECONDS)
            assert ready, f"no {text!r} in {self._seen!r}"
            try:
                self._seen += os.read(self._master, 1 << 16).decode()
            except OSError:  # The program has ended.
                raise AssertionError(f"no {text!r} in {self._seen!r}") from None
        before, _, self._seen = self._seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def waits(self) -> None:
        """Wait until the program does: Python handles a signal that comes just before a system call
        after that call."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.001)


@contextlib.contextmanager
def terminal(home: Path, *argv: str, **more: str) -> Iterator[Terminal]:
    """`jackfield ARGV` on a terminal, with a home of its own."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x32\x00\xc8\x00\x00\x00\x00\x00")
    environment = {**os.environ, "HOME": str(home), "TERM": "xterm", **more}
    for name in ("XDG_STATE_HOME", "NO_COLOR", "JACKFIELD_URL"):
        if name not in more:
            environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *argv],
        stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_ctrl_c_ends_an_answer_and_not_the_conversation(scripted: Scripted, tmp_path: Path) -> None:
    with terminal(tmp_path, "chat", "--url", scripted.url) as screen:
        screen.expect("> ")
        screen.type("long\n")
        screen.expect("echo long")
        screen.waits()
        screen.type("\x03")
        screen.expect("(stopped)")
        assert scripted.left.wait(SECONDS)
        screen.expect("> ")
        screen.waits()
        screen.type("half a li\x03")
        screen.expect("(Ctrl-D or /exit ends the conversation)")
        screen.expect("> ")
        screen.type("more\n")
        screen.expect("echo more")
        screen.expect("> ")
        screen.type("\x04")
        assert screen.process.wait(SECONDS) == 0
    assert [m["content"] for m in scripted.bodies[-1]["messages"]] == ["long", "echo long", "more"]


def test_a_refusal_does_not_end_the_conversation(scripted: Scripted, tmp_path: Path) -> None:
    with terminal(tmp_path, "chat", "--url", scripted.url) as screen:
        screen.expect("> ")
        screen.type("one\n")
        screen.expect("echo one")
        screen.expect("> ")
        screen.type("refuse\n")
        screen.expect("jackfield: the server refused: max_tokens: too many")
        screen.expect("> ")
        screen.type("two\n")
        screen.expect("echo two")
        screen.expect("> ")
        screen.type("/exit\n")
        assert screen.process.wait(SECONDS) == 0
    assert [m["content"] for m in scripted.bodies[-1]["messages"]] == ["one", "echo one", "two"]


def test_arrow_keys_edit_and_bring_back_lines_of_the_last_time(
    scripted: Scripted, tmp_path: Path
) -> None:
    for keys, sent in (("helo\x1b[Dl\n", "hello"), ("\x1b[A!\n", "hello!")):
        with terminal(tmp_path, "chat", JACKFIELD_URL=scripted.url) as screen:
            screen.expect("> ")
            screen.type(keys)
            screen.expect(f"echo {sent}")
            screen.expect("> ")
            screen.type("\x04")
            assert screen.process.wait(SECONDS) == 0
    file = tmp_path / ".local/state/jackfield/chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert "hello!" in file.read_text()


def test_history_is_optional(scripted: Scripted, tmp_path: Path) -> None:
    with terminal(tmp_path, "chat", "--url", scripted.url, "--no-history") as screen:
        screen.expect("> ")
        screen.type("hello\n")
        screen.expect("echo hello")
        screen.expect("> ")
        screen.type("\x04")
        assert screen.process.wait(SECONDS) == 0
    assert not list(tmp_path.rglob("*history*"))


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({}, "\x1b[2mso it is\r\n\r\n\x1b[0mecho think"),
        ({"NO_COLOR": "1"}, "so it is\r\n\r\necho think"),
    ],
)
def test_reasoning_looks_different_from_the_answer(
    scripted: Scripted, tmp_path: Path, more: dict[str, str], shown: str
) -> None:
    with terminal(tmp_path, "chat", "--url", scripted.url, "-m", "think", **more) as screen:
        assert screen.expect("echo think") + "echo think" == shown
        assert screen.process.wait(SECONDS) == 0


def test_a_model_does_not_command_the_terminal(scripted: Scripted, tmp_path: Path) -> None:
    with terminal(tmp_path, "chat", "--url", scripted.url, "-m", "hostile") as screen:
        assert screen.expect("echo hostile") == "red ␛[31m␇"


# ---------------------------------------------------------------- commands


def converse(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, *lines: str, flags: tuple[str, ...] = ()
) -> int:
    """A conversation from a pipe."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as file:
        file.write("\n".join(lines) + "\n")
    with os.fdopen(read) as source:
        monkeypatch.setattr(sys, "stdin", source)
        return main(["chat", "--url", scripted.url, *flags])


def test_commands(
    scripted: Scripted,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "talk 1.json"
    status = converse(
        scripted, monkeypatch,
        "one", "/set temperature 0.5", "/set max-tokens 9", "two", "/retry", f"/save '{file}'",
        f"/save '{file}'", "/clear", "/set temperature", "three", f"/load '{file}'",
        "/system Be brief.", "four", "//etc/passwd", "first\\", "second", "/set nonsense 1",
        "/set temperatur 1", "/celar", "/zzz", "/load /no/such", "/save", "/help", "/quit", "never",
        flags=("--system-prompt", "Be kind.", "--model-name", "m"),
    )  # fmt: skip
    assert status == 0
    sent = [
        ([m["content"] for m in body["messages"]], body.get("temperature"), body.get("max_tokens"))
        for body in scripted.bodies
    ]
    talk = ["one", "echo one", "two"]
    later = ["Be brief.", *talk, "echo two", "four", "echo four", "/etc/passwd"]
    assert sent == [
        (["Be kind.", "one"], None, None),
        (["Be kind.", *talk], 0.5, 9),
        (["Be kind.", *talk], 0.5, 9),
        (["Be kind.", "three"], None, 9),
        (later[:-2], None, 9),
        (later, None, 9),
        ([*later, "echo /etc/passwd", "first\nsecond"], None, 9),
    ]
    assert all(body["model"] == "m" for body in scripted.bodies)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    output = capsys.readouterr()
    assert "/save FILE" in output.out
    says = (
        "is there already", "nonsense is no setting; there are: model,", "did you mean temperature",
        "did you mean /clear", "/zzz is no command; /help", "/no/such cannot be read",
        "give one FILE",
    )  # fmt: skip
    for line, says_that in zip(output.err.splitlines(), says, strict=True):
        assert says_that in line


def test_the_status_tells_whether_the_last_message_had_a_response(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert converse(scripted, monkeypatch, "refuse") == 1
    assert converse(scripted, monkeypatch, "refuse", "hi") == 0
    assert main(["chat", "--url", scripted.url, "-q", "refuse"]) == 1


def test_stats_are_the_servers(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", scripted.url, "--quick", "hi", "--stats"]) == 0
    output = capsys.readouterr()
    assert output.out == "echo hi\n" and output.err.startswith("7 tokens, the first after ")
    assert scripted.bodies[-1]["stream_options"] == {"include_usage": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(config(save_random(tmp_path_factory.mktemp("random")))) as running_server:
        yield running_server


def test_vllms_flags_and_the_variable(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JACKFIELD_URL", f"{server.url}/v1")
    flags = ["--max-tokens", "3", "--stats"]
    assert main(["complete", "-q", "Once", *flags]) == 0
    assert capsys.readouterr().err.startswith("3 tokens, the first after ")
    assert main(["complete", "-q", "Once", "--model-name", "other"]) == 1
    assert "'other' is not served here" in capsys.readouterr().err
    monkeypatch.setenv("JACKFIELD_URL", "nowhere")
    with pytest.raises(SystemExit) as raised:
        main(["complete", "x"])
    assert raised.value.code == 2
    assert "--url: must be like http://127.0.0.1:8000, got 'nowhere'" in capsys.readouterr().err

"""`jackfield top` shows what /metrics says of a running server."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Server, engine_config, running

from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.entrypoints.cli import top
from jackfield.entrypoints.http.options import ServerOptions


@pytest.fixture(scope="module", params=["jackfield", "vllm", "both"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    options = ServerOptions(metrics_prefix=request.param)
    with running(engine_config(EMBEDDED_MODEL, device="cpu"), options) as running_server:
        yield running_server


def test_the_view_shows_what_was_between_two_looks(server: Server) -> None:
    view, before = top.View(server.url), top.read(server.url)
    view.lines(before)
    body = {"prompt": "Hello", "max_tokens": 12, "ignore_eos": True}
    assert httpx.post(server.url + "/v1/completions", json=body, timeout=60).status_code == 200
    assert httpx.post(server.url + "/v1/completions", json={}, timeout=60).status_code == 400
    shown = "\n".join(view.lines(top.read(server.url)._replace(at=before.at + 4)))
    assert server.url in shown and "tiny" in shown.splitlines()[0]
    assert re.search(r"^tokens/s +3\.0 ", shown, re.M), shown
    assert re.search(r"^running +0 ", shown, re.M)
    assert re.search(r"^finished +.*length [1-9]", shown, re.M)
    assert re.search(r"^HTTP +2xx 2  4xx 1  5xx 0$", shown, re.M), "the first look is one of them"
    assert re.search(r"^first token +p50 ≤ .+ p95 ≤ .+ p99 ≤ ", shown, re.M)


def test_once_prints_one_view(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.run(["--url", server.url, "--once", "--interval", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == [
        "running",
        "waiting",
        "prompt/s",
        "tokens/s",
    ]
    assert "\x1b" not in "".join(lines)


def test_a_terminal_is_redrawn_until_interrupted(server: Server) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "jackfield.entrypoints.cli.main", "top"]
    process = subprocess.Popen(
        [*command, "--url", server.url, "--interval", "0.1"], stdout=follower, stdin=follower
    )
    os.close(follower)
    screens, shown = b"", threading.Event()
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        while not shown.is_set():
            screens += os.read(leader, 65536)
            if screens.count(top.CLEAR_BELOW.encode()) >= 3:
                shown.set()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        screens += os.read(leader, 65536)
    finally:
        watchdog.cancel()
        process.kill()
        os.close(leader)
    text = screens.decode()
    assert text.startswith(top.OPEN) and text.rstrip().endswith(top.CLOSE)
    assert "tokens/s" in text and "KV cache" in text


@pytest.mark.parametrize("body", [b"<html>", b"other_metric 1\n", b"\xff"])
def test_what_is_no_server_is_said(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Response:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self, _: int) -> bytes:
            return body

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Response())
    with pytest.raises(top.Unreachable, match="http://here/metrics"):
        top.read("http://here")


def test_no_server_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.run(["--url", "http://127.0.0.1:1", "--once"]) == 1
    assert "http://127.0.0.1:1/metrics" in capsys.readouterr().err


def test_engines_are_added_up_and_their_caches_averaged() -> None:
    text = "".join(
        f'jackfield:num_requests_running{{model_name="a",engine="{e}"}} {e + 1}\n'
        f'jackfield:kv_cache_usage_perc{{model_name="a",engine="{e}"}} {e / 2}\n'
        f'jackfield:request_success_total{{model_name="a",finished_reason="stop",engine="{e}"}} 4\n'
        for e in (0, 1)
    )
    snapshot = top.parse(text, 0.0)
    assert snapshot.get("num_requests_running") == 3
    assert snapshot.usage == 0.25
    assert snapshot.by_label["request_success_total"] == {"stop": 8}


def test_a_name_cannot_write_to_the_terminal() -> None:
    snapshot = top.parse('jackfield:num_requests_running{model_name="a\x1b[2Jb"} 1\n', 0.0)
    assert "\x1b" not in "".join(top.View("http://here").lines(snapshot))


def test_plots_and_quantiles() -> None:
    assert top.plot([0, 1, 2, 4, 8, 0.001]) == " ▁▂▄█▁"
    assert top.plot([0, 0]) == "  " and top.plot([]) == ""
    counts = {0.1: 5.0, 0.5: 9.0, 1.0: 10.0, float("inf"): 10.0}
    assert [top.quantile(counts, share) for share in (0.5, 0.9, 0.95)] == [0.1, 0.5, 1.0]

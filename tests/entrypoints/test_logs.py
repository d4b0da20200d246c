"""Logs as JSON with request ids; outputs in the log, cut and redacted."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import MODEL, Server, engine_config, running

from jackfield.core.errors import ConfigError
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.registry import load_plugins
from jackfield.entrypoints.http import log_format
from jackfield.entrypoints.http.log_format import JsonFormatter, LoggedText, OutputLog
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.server.serve_settings import settings

MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 5},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 5},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 5},
    "/api/chat": {"model": MODEL, "messages": MESSAGES, "options": {"num_predict": 5}},
    "/api/generate": {"model": MODEL, "prompt": "Hello", "options": {"num_predict": 5}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    plugins = load_plugins(extra=[OutputLog(LoggedText(None))])
    options = ServerOptions(log_requests=True, max_log_len=8)
    with running(engine_config(EMBEDDED_MODEL), options, plugins=plugins) as running_server:
        yield running_server


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What is logged, as JSON lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    loggers = [logging.getLogger("jackfield.outputs"), logging.getLogger("jackfield.requests")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield stream
    for logger, level in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def lines(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_an_output_is_logged_with_the_id_of_its_response(
    route: str, stream: bool, server: Server, log: io.StringIO
) -> None:
    body = {**BODIES[route], "temperature": 0, "stream": stream}
    response = httpx.post(server.url + route, json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert server.becomes(lambda engine: not engine._events._tasks and len(lines(log)) == 2)
    sent, given = lines(log)
    assert {sent["request_id"], given["request_id"]} == {response.headers["X-Request-Id"]}
    assert [sent["logger"], given["logger"]] == ["jackfield.requests", "jackfield.outputs"]
    assert sent["message"].startswith(f'POST "{route}" ') and "characters)" in sent["message"]
    if route == "/v1/completions" and not stream:
        [choice] = response.json()["choices"]
        assert given["message"].endswith(
            f"{choice['finish_reason']}, 5 tokens: " + json.dumps(choice["text"])
        )


def test_a_clients_id_is_logged(server: Server, log: io.StringIO) -> None:
    body, headers = BODIES["/v1/completions"], {"X-Request-Id": "mine"}
    httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60)
    assert server.becomes(lambda engine: len(lines(log)) == 2)
    assert {line["request_id"] for line in lines(log)} == {"mine"}


def test_texts_are_redacted_and_then_cut() -> None:
    shown = LoggedText(12, (r"\d{4}", "secret"))
    assert shown("a 1234 b") == '"a [redacted]" … (8 characters)'
    assert LoggedText(None, (r"\d{4}", "secret"))("secret 12345") == '"[redacted] [redacted]5"'
    # A match over the place of the cut leaves no half.
    assert "12" not in LoggedText(4, (r"\d{4}",))("ab 1234")
    assert LoggedText(3)("a\nb") == r'"a\nb"'
    assert LoggedText(3)("abcd") == '"abc" … (4 characters)'
    assert LoggedText(None)("x" * 100_000) == json.dumps("x" * 100_000)
    whole = LoggedText(None, ("y",))("x" * 100_000)
    assert whole == json.dumps("x" * log_format.MAX_SEARCHED) + " … (100000 characters)"


def test_an_error_is_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "%s\n", ("b",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    facts = json.loads(line)
    assert (facts["level"], facts["message"]) == ("error", "b\n")
    assert facts["exception"].endswith("ValueError: two\nlines")
    assert "request_id" not in facts


def test_options_turn_them_on() -> None:
    program = (
        "import logging\n"
        "from jackfield.entrypoints.server.serve_settings import settings\n"
        "made = settings(['--log-format', 'json', '--enable-log-outputs', '--log-redact', 'a+'])\n"
        "assert made.plugins.has_listeners('request_finished')\n"
        "assert logging.getLogger('jackfield.outputs').isEnabledFor(logging.INFO)\n"
        "assert not logging.getLogger('jackfield.requests').isEnabledFor(logging.INFO)\n"
        "logging.getLogger('mine').warning('there')\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    last = json.loads(done.stderr.splitlines()[-1])
    assert (last["logger"], last["level"], last["message"]) == ("mine", "warning", "there")
    assert not settings([]).plugins.has_listeners("request_finished")


def test_a_bad_pattern_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ConfigError)):
        settings(["--log-redact", "("])
    assert "is no regular expression" in capsys.readouterr().err

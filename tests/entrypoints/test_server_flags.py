"""Flags of the server: from a YAML file, vLLM's names, and what wrong ones are told."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest

from jackfield import EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.entrypoints.cli.main import main
from jackfield.entrypoints.flags.config_file import with_config
from jackfield.entrypoints.http.connection_limits import ConnectionLimits
from jackfield.entrypoints.http.options import BatchOptions, Cors, ServerOptions
from jackfield.entrypoints.server.info_routes import with_prefix
from jackfield.entrypoints.server.listen import Listen
from jackfield.entrypoints.server.serve_settings import (
    check_tool_parser,
    listen,
    make_parser,
    server_options,
    settings,
)

PARSER = make_parser()


def flags(*argv: str) -> argparse.Namespace:
    return PARSER.parse_args(list(argv))


def options(*argv: str) -> ServerOptions:
    """As `jackfield serve` makes them."""
    return server_options(flags(*argv))


def merged(tmp_path: Path, text: str, *argv: str) -> argparse.Namespace:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    parser = make_parser()
    arguments = ["--config", str(path), *argv]
    args = parser.parse_args(arguments)
    return parser.parse_args(with_config(parser, arguments, args))


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    text = """
        model: from-file
        port: 1
        host: 0.0.0.0
        api-key: [a, b]
        served_model_name: [x, y]
        enable-prefix-caching: false
        enable-plugins-route: true
        disable-docs: false
        structured-outputs-config: {backend: xgrammar}
        hf-overrides: null
    """
    args = merged(tmp_path, text, "--port=2", "--api-key", "c")
    assert (args.port, args.host, args.api_key) == (2, "0.0.0.0", ["c"])
    assert args.served_model_name == ["x", "y"]
    assert args.enable_prefix_caching is False
    assert args.enable_plugins_route is True and args.disable_docs is False
    assert args.structured_outputs_config == {"backend": "xgrammar"}
    assert not hasattr(args, "hf_overrides")
    assert (args.model, args.model_flag) == ("", "from-file")
    args = merged(tmp_path, text, "mine", "--enable-prefix-caching")
    assert (args.model, args.model_flag) == ("mine", None)
    assert args.enable_prefix_caching is True and args.api_key == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("max-modle-len: 3", "max-modle-len: no such flag; did you mean max-model-len?"),
        ("max_num_seq: 3", "max_num_seq: no such flag; did you mean max-num-seqs?"),
        ("config: other.yaml", "config: a file names no other file"),
        ("- port", "must be a mapping"),
        ("a: [", "--config:"),
        ("disable-docs: maybe", "disable-docs: must be true or false, got 'maybe'"),
    ],
)
def test_a_wrong_file_is_refused_by_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, output: str
) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    assert main(["serve", "--config", str(tmp_path / "serve.yaml")]) == 2
    assert output in capsys.readouterr().err


def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "output"),
    [
        (["--ssl-keyfle", "x"], "did you mean --ssl-keyfile?"),
        (["--disable-fastapi-doc"], "did you mean --disable-fastapi-docs?"),
        (["--limit-concurrency", "0"], "must be at least 1, got 0"),
        (["--allowed-origins", "[1]"], "a list of texts is needed"),
        (["--access-log", "xml"], "invalid choice"),
        (["--root-path", "llm"], "--root-path: must begin with /, got 'llm'"),
        (["--response-role", ""], "--response-role: must not be empty"),
        (["--api-key", " "], "--api-key: must not be empty"),
        (["--batch-max-concurrency", "0"], "--batch-max-concurrency: must be at least 1, got 0"),
        (["--ssl-cert-reqs", "all"], "--ssl-cert-reqs: must be a whole number, got 'all'"),
    ],
)
def test_wrong_flags_are_explained(
    capsys: pytest.CaptureFixture[str], argv: list[str], output: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        flags(*argv)
    assert stop.value.code == 2
    assert output in capsys.readouterr().err


def test_calls_by_themselves_need_a_parser_by_option_or_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for config in (EngineConfig(tool_call_parser="none"), EngineConfig(model=str(tmp_path))):
        with pytest.raises(ConfigError, match="--enable-auto-tool-choice: needs"):
            check_tool_parser(config)
    (tmp_path / "jackfield.json").write_text('{"tool_call_parser": "hermes"}')
    check_tool_parser(EngineConfig(model=str(tmp_path)))


def test_vllms_names_mean_the_same() -> None:
    parsed = options("--disable-fastapi-docs", "--disable-uvicorn-access-log")
    assert not parsed.docs and parsed.access_log == "off"
    assert options("--enable-log-requests").log_requests
    assert not options("--enable-log-requests", "--disable-log-requests").log_requests
    assert flags("--uvicorn-log-level", "error").log_level == "error"
    check_tool_parser(EngineConfig(tool_call_parser="hermes"))


def test_without_flags_options_have_the_defaults_of_their_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("JACKFIELD_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    parsed = options()
    assert parsed == ServerOptions(started=parsed.started)
    assert listen(flags()) == Listen()


def test_each_flag_reaches_its_field(tmp_path: Path) -> None:
    """Of options, and of those within them."""
    parsed = options(
        "--batch-dir", str(tmp_path), "--batch-max-concurrency", "3", "--max-connections", "9",
        "--timeout-keep-alive", "1.5", "--allowed-methods", '["get"]', "--allow-credentials",
        "--allowed-hosts", "a", "b", "--limit-concurrency", "4", "--no-playground",
        "--no-enable-request-id-headers", "--root-path", "/llm/", "--max-stored-responses", "0",
        "--shutdown-timeout", "0", "--access-log", "json",
    )  # fmt: skip
    assert parsed.batches == BatchOptions(tmp_path, max_concurrency=3)
    assert parsed.connections == ConnectionLimits(max_connections=9, idle_seconds=1.5)
    assert parsed.cors == Cors(methods=("GET",), credentials=True)
    assert (parsed.allowed_hosts, parsed.max_concurrency) == (("a", "b"), 4)
    assert not parsed.playground and not parsed.request_id_headers
    assert (parsed.root_path, parsed.max_stored_responses, parsed.shutdown_timeout) == (
        "/llm",
        0,
        0.0,
    )
    assert parsed.access_log == "json"
    place = listen(flags("--host", "::", "--port", "0", "--uds", "x"))
    assert (place.host, place.port, place.uds, place.tls) == ("::", 0, "x", None)


def test_metrics_are_shown_under_vllms_prefix() -> None:
    text = (
        b"# HELP jackfield:num_requests_running Requests, of jackfield: all.\n"
        b"# TYPE jackfield:num_requests_running gauge\n"
        b'jackfield:num_requests_running{model_name="jackfield:x"} 1.0\n'
        b"# TYPE mine gauge\nmine 2.0\n"
    )
    renamed = text.replace(b" jackfield:num", b" vllm:num").replace(b"\njackfield:", b"\nvllm:")
    assert with_prefix(text, "jackfield") == text
    assert with_prefix(text, "vllm") == renamed
    assert b'vllm:num_requests_running{model_name="jackfield:x"} 1.0\n' in renamed
    assert with_prefix(text, "both") == text + b"".join(renamed.splitlines(keepends=True)[:3])
    assert options("--metrics-prefix", "both").metrics_prefix == "both"


@pytest.mark.parametrize(
    ("flags", "logged"),
    [
        ([], True),
        (["--log-level", "info"], True),
        (["--disable-log-stats"], False),
        (["--log-level", "error"], False),
    ],
)
def test_the_engines_statistics_are_logged_unless_turned_off(
    flags: list[str], logged: bool
) -> None:
    logger = logging.getLogger("jackfield.stats")
    before = logger.level
    try:
        assert settings(flags).options.log_stats is ("--disable-log-stats" not in flags)
        assert logger.isEnabledFor(logging.INFO) is logged
    finally:
        logger.setLevel(before)

"""Flags of the HTTP server: TLS, keys, other sites' pages, logs, limits. Names are vLLM's."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.config import EngineConfig
from ...core.errors import ConfigError
from ..openai.connection_limits import MAX_JSON_VALUES, ConnectionLimits

if TYPE_CHECKING:
    from ..openai.tls import Tls

KEYS = ("JACKFIELD_API_KEY", "VLLM_API_KEY")
"""Variables with API keys, separated by commas."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Everything about HTTP but where to listen."""
    tls = parser.add_argument_group("TLS")
    tls.add_argument("--ssl-certfile", metavar="PATH", help="certificate (PEM): serve HTTPS")
    tls.add_argument("--ssl-keyfile", metavar="PATH", help="its key, if not in the same file")
    tls.add_argument("--ssl-ca-certs", metavar="PATH", help="whose clients' certificates to trust")
    tls.add_argument(
        "--ssl-cert-reqs",
        type=int,
        default=0,
        metavar="N",
        help="clients' certificates: 0 none, 1 checked if there is one, 2 required (default: 0)",
    )
    tls.add_argument("--ssl-ciphers", metavar="LIST", help="OpenSSL's list, for TLS 1.2")
    tls.add_argument(
        "--enable-ssl-refresh", action="store_true", help="load the files again when they change"
    )
    http = parser.add_argument_group("HTTP")
    limits = ConnectionLimits()
    http.add_argument(
        "--api-key-file",
        action="append",
        default=[],
        metavar="PATH",
        help="file with an API key a line, or its name, digest and limits (`jackfield keys`); read "
        "again on SIGHUP; repeatable",
    )
    for name, default, text in (
        ("origins", (), "sites whose pages may talk to the server; * for all (default: none)"),
        ("methods", ("*",), "methods they may use (default: all)"),
        ("headers", ("*",), "headers they may send (default: all)"),
    ):
        http.add_argument(
            f"--allowed-{name}",
            nargs="+",
            action=_Words,
            default=default,
            metavar=name[:-1].upper(),
            help=f"{text}; words, or a JSON list",
        )
    http.add_argument(
        "--allowed-hosts",
        nargs="+",
        action=_Words,
        default=None,
        metavar="HOST",
        help="names under which the server may be reached, *.NAME for all below, * for all; an "
        "address always may be (default: localhost for a server on a loopback address without "
        "keys, otherwise all)",
    )
    http.add_argument(
        "--allow-credentials", action="store_true", help="those pages may send cookies"
    )
    http.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="where a proxy, which takes the prefix off, shows the server",
    )
    http.add_argument(
        "--enable-request-id-headers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="X-Request-Id on every answer: the request's own, or a new one (default: on)",
    )
    http.add_argument(
        "--disable-docs",
        "--disable-fastapi-docs",
        action="store_true",
        help="serve neither /docs nor /openapi.json",
    )
    http.add_argument(
        "--limit-concurrency",
        type=at_least_one,
        metavar="N",
        help="answer at most so many requests at once, more get a 503 (default: no limit)",
    )
    http.add_argument(
        "--max-json-values",
        type=at_least_one,
        default=MAX_JSON_VALUES,
        metavar="N",
        help="refuse bodies with more values; an array or object counts as 8, a key as 24 "
        "(default: %(default)s)",
    )
    http.add_argument(
        "--max-connections",
        type=at_least_one,
        metavar="N",
        help="open connections at once, of each front end; beyond, the oldest one without a "
        "request is closed (default: what the limit of descriptors allows)",
    )
    for name, allowed, text in (
        ("header", limits.header_seconds, "for a request's headers to come"),
        ("body", limits.body_seconds, "for a body to come, or to bring 1 KiB for each of them"),
        ("keep-alive", limits.idle_seconds, "without a request before a connection is closed"),
        ("send", limits.send_seconds, "for a client to read nothing of its response"),
    ):
        http.add_argument(
            f"--timeout-{name}",
            type=seconds,
            default=allowed,
            metavar="SECONDS",
            help=f"{text}; 0: no limit (default: %(default)g)",
        )
    http.add_argument(
        "--metrics-prefix",
        choices=("jackfield", "vllm", "both"),
        default="jackfield",
        help="prefix of the metrics at /metrics: with vllm, dashboards made for it find them "
        "(default: %(default)s)",
    )
    http.add_argument(
        "--access-log",
        choices=("off", "text", "json"),
        default="off",
        help="a line a request, to standard error (default: off)",
    )
    http.add_argument(
        "--disable-uvicorn-access-log",
        dest="access_log",
        action="store_const",
        const="off",
        help="the same as --access-log off",
    )
    http.add_argument(
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="log the bodies of requests, prompts included (default: off)",
    )
    http.add_argument(
        "--disable-log-requests",
        dest="enable_log_requests",
        action="store_false",
        help="the same as --no-enable-log-requests",
    )
    http.add_argument(
        "--max-log-len",
        type=at_least_none,
        metavar="N",
        help="log at most so many characters of a body (default: all)",
    )
    chat = parser.add_argument_group("chat")
    chat.add_argument(
        "--response-role", default="assistant", help="role of the answers (default: assistant)"
    )
    chat.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="let the model decide whether to call tools; always on where there is a "
        "--tool-call-parser, which it needs",
    )


def _names_a_tool_parser(config: EngineConfig) -> bool:
    """Whether the options do, or the checkpoint does."""
    from ...core.engine.resolve import NONE
    from ...core.loading.dialects import read_dialects
    from ...core.loading.model_config import checkpoint_folder

    if config.tool_call_parser is not None:
        return config.tool_call_parser != NONE
    folder = checkpoint_folder(config.model, config.revision)
    return read_dialects(folder).tool_call_parser is not None


def server_options(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """For ServerOptions, but what `serve` itself has flags for. Raises ConfigError."""
    from ..openai.cors import Cors

    if args.enable_auto_tool_choice and not _names_a_tool_parser(config):
        raise ConfigError(
            "--enable-auto-tool-choice: needs --tool-call-parser", param="enable_auto_tool_choice"
        )
    root = args.root_path.rstrip("/")
    if root and not root.startswith("/"):
        raise ConfigError(f"--root-path: must begin with /, got {root!r}", param="root_path")
    if not args.response_role:
        raise ConfigError("--response-role: must not be empty", param="response_role")
    return {
        "docs": not args.disable_docs,
        "root_path": root,
        "cors": Cors(
            args.allowed_origins,
            tuple(method.upper() for method in args.allowed_methods),
            args.allowed_headers,
            args.allow_credentials,
        ),
        "request_id_headers": args.enable_request_id_headers,
        "allowed_hosts": args.allowed_hosts,
        "max_concurrency": args.limit_concurrency,
        "max_json_values": args.max_json_values,
        "connections": ConnectionLimits(
            header_seconds=args.timeout_header,
            body_seconds=args.timeout_body,
            idle_seconds=args.timeout_keep_alive,
            send_seconds=args.timeout_send,
            max_connections=args.max_connections,
        ),
        "response_role": args.response_role,
        "metrics_prefix": args.metrics_prefix,
        "access_log": args.access_log,
        "log_requests": args.enable_log_requests,
        "max_log_len": args.max_log_len,
    }


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """From flags and the environment. Raises ConfigError."""
    keys = [key.strip() for key in args.api_key]
    if not all(keys):
        raise ConfigError("--api-key: must not be empty", param="api_key")
    for name in KEYS:
        keys += [key.strip() for key in os.environ.get(name, "").split(",") if key.strip()]
    return tuple(dict.fromkeys(keys))


def key_files(args: argparse.Namespace) -> tuple[Path, ...]:
    """Files with keys, which can be read. Raises ConfigError with the line."""
    from ..openai.api_keys import read_keys

    paths = tuple(Path(path) for path in args.api_key_file)
    for path in paths:
        read_keys(path)
    return paths


def tls(args: argparse.Namespace) -> Tls | None:
    """None: plain HTTP. Raises ConfigError."""
    from ..openai.tls import Tls

    if args.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
            if getattr(args, name):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag}: needs --ssl-certfile", param=name)
        if args.enable_ssl_refresh:
            raise ConfigError("--enable-ssl-refresh: needs --ssl-certfile", param="ssl_certfile")
        return None
    made = Tls(
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
        refresh=args.enable_ssl_refresh,
    )
    made.context()  # What is wrong is told before a model is loaded.
    return made


class _Words(argparse.Action):
    """Words, or vLLM's way of writing them: one JSON list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        words = list(values or ())
        if len(words) == 1 and words[0].lstrip().startswith("["):
            try:
                words = json.loads(words[0])
            except ValueError as error:
                parser.error(f"argument {option_string}: no JSON list: {error}")
            if not all(isinstance(word, str) for word in words):
                parser.error(f"argument {option_string}: a list of texts is needed")
        setattr(namespace, self.dest, tuple(words))


def _number(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def at_least_one(text: str) -> int:
    """A flag's type."""
    return _number(text, 1)


def at_least_none(text: str) -> int:
    """A flag's type."""
    return _number(text, 0)


def port_number(text: str) -> int:
    """A flag's type: beyond 65535, resolvers take what is left of it, and bind another port."""
    value = _number(text, 0)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"must be at most 65535, got {value}")
    return value


def seconds(text: str) -> float:
    """A flag's type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return value

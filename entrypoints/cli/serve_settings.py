"""What a command line of `jackfield serve` says."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING, NamedTuple

from ...core.config import EngineConfig
from ...core.registry import Plugins, load_plugins
from .batch_flags import add_batch_flags, batch_options
from .config_file import add_config, with_config, without_config
from .options import Parser, add_engine_options, engine_config
from .server_options import (
    add_server_options,
    api_keys,
    at_least_none,
    at_least_one,
    key_files,
    port_number,
    seconds,
    server_options,
    tls,
)
from .vllm_flags import MISSING, add_vllm_flags, without_effect

if TYPE_CHECKING:
    from ..openai.context import ServerOptions
    from ..openai.server import Listen


logger = logging.getLogger("jackfield.serve")


def make_parser() -> Parser:
    parser = Parser(prog="jackfield serve", description="Serve a model over HTTP, as OpenAI does.")
    parser.add_argument(
        "model", nargs="?", default="", help="checkpoint folder or hub name; none: the embedded one"
    )
    parser.add_argument("--model", dest="model_flag", help=argparse.SUPPRESS)
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to bind (default: loopback)")
    server.add_argument(
        "--port", type=port_number, default=8000, help="port to bind; 0: any free one"
    )
    server.add_argument("--uds", help="listen on a Unix socket instead")
    server.add_argument(
        "--api-server-count",
        "-asc",
        type=at_least_one,
        default=1,
        metavar="N",
        help="front-end processes that share the port, before one engine process; 1: all in one",
    )
    server.add_argument(
        "--api-key",
        action="append",
        default=[],
        help="key that clients must send; repeatable; also from JACKFIELD_API_KEY, VLLM_API_KEY",
    )
    server.add_argument(
        "--max-completions-per-request",
        type=at_least_one,
        default=1024,
        metavar="N",
        help="completions that one request may start: prompts times n",
    )
    server.add_argument(
        "--max-stored-responses",
        type=at_least_none,
        default=1000,
        help="keep so many of /v1/responses in memory, the newest ones; 0: none",
    )
    server.add_argument(
        "--max-stored-response-bytes",
        type=at_least_none,
        default=256 << 20,
        help="drop the oldest responses when all of them together are larger",
    )
    server.add_argument(
        "--max-body-bytes", type=at_least_one, default=32 << 20, help="refuse larger requests"
    )
    server.add_argument(
        "--enable-plugins-route",
        action="store_true",
        help="serve GET /v1/plugins: what is plugged in, and whether it works here",
    )
    server.add_argument(
        "--playground",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve a page for people at /",
    )
    server.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let chats bring a template of their own (chat_template)",
    )
    server.add_argument(
        "--shutdown-timeout", type=seconds, default=60.0, help="seconds to drain after SIGTERM"
    )
    server.add_argument(
        "--log-level",
        "--uvicorn-log-level",
        default="warning",
        choices=("debug", "info", "warning", "error", "critical"),
        help="least level that is logged",
    )
    server.add_argument(
        "--enable-admin",
        action="store_true",
        help="serve POST /reset_prefix_cache and GET /server_info",
    )
    add_batch_flags(parser)
    add_config(server)
    add_server_options(parser)
    add_engine_options(parser)
    add_vllm_flags(parser)
    parser.missing = MISSING
    return parser


class Settings(NamedTuple):
    """All of it, checked."""

    config: EngineConfig
    plugins: Plugins
    listen: Listen
    options: ServerOptions
    fronts: int
    argv: list[str]
    """The command line, with the flags of a configuration file written out."""


def settings(argv: list[str], *, remarks: bool = True) -> Settings:
    """Parse, check, load the plugins, set up logging. Raises ConfigError, PluginError.

    `remarks`: say which flags have no effect.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.config is not None:
        argv = without_config(with_config(parser, argv, args))
        args = parser.parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for sentence in without_effect(args) if remarks else ():
        logger.warning("%s", sentence)
    config = engine_config(args, args.model_flag or args.model)
    given = server_options(args, config)
    plugins = load_plugins(disable=config.disable_plugins)
    from ..openai import request_log
    from ..openai.context import ServerOptions
    from ..openai.server import Listen

    request_log.set_up(args.access_log, args.enable_log_requests)
    options = ServerOptions(
        api_keys=api_keys(args),
        api_key_files=key_files(args),
        max_body_bytes=args.max_body_bytes,
        max_completions_per_request=args.max_completions_per_request,
        max_stored_responses=args.max_stored_responses,
        max_stored_response_bytes=args.max_stored_response_bytes,
        shutdown_timeout=args.shutdown_timeout,
        enable_plugins_route=args.enable_plugins_route,
        enable_admin=args.enable_admin,
        batches=batch_options(args),
        playground=args.playground,
        trust_request_chat_template=args.trust_request_chat_template,
        **given,
    )
    listen = Listen(args.host, args.port, args.uds, tls(args))
    return Settings(config, plugins, listen, options, args.api_server_count, argv)

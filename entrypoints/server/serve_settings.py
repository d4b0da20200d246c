"""`jackfield serve`'s command line: parser and checked options."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ...core.config import EngineConfig
from ...core.errors import ConfigError
from ...core.registry import Plugins, Provenance, load_plugins
from ..flags.config_file import add_config, with_config, without_config
from ..flags.dataclass_flags import Flag, add_flags, fields_of, from_flags
from ..flags.engine_flags import add_engine_options, engine_config
from ..flags.foreign_options import Line, translated
from ..flags.parser import Parser
from ..flags.sglang_flags import sglang_options
from ..flags.vllm_environment import environment_lines
from ..flags.vllm_flags import VLLM_GROUPS, vllm_options
from ..http.log_format import LoggedText, OutputLog, formatter
from ..http.options import ServerOptions
from ..http.tls import Tls
from .listen import Listen

logger = logging.getLogger("jackfield.serve")
KEY_VARIABLES = ("JACKFIELD_API_KEY", "VLLM_API_KEY")
"""Environment variables with comma-separated API keys."""
PROFILE_VARIABLE = "VLLM_TORCH_PROFILER_DIR"
"""Environment variable with vLLM's folder of profiles."""
GROUPS = {
    "server": "Address, keys, logs, and what is served besides the API.",
    "batches": "Files of requests, answered behind the others.",
    "TLS": "HTTPS.",
    "HTTP": "Browsers, proxies, limits, timeouts and metrics.",
    "chat": "Templates, tool calls and roles of chats.",
}
"""Titles of flag groups → descriptions."""
COMMON = (
    "--port", "--host", "--api-key-file", "--max-model-len", "--max-num-seqs",
    "--gpu-memory-utilization", "--tensor-parallel-size", "--quantization", "--tool-call-parser",
    "--served-model-name", "--config",
)  # fmt: skip
"""Flags in the short help."""


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The command's own options."""

    api_server_count: Annotated[
        int,
        Meta(
            ge=1,
            description="front-end processes that share the port, before one engine process; 1: "
            "all in one",
        ),
        Flag(aliases=("-asc",), group="server", metavar="N"),
    ] = 1
    headless: Annotated[
        bool,
        Meta(
            description="serve nothing: run this host's ranks for the engine of the first of "
            "--nnodes hosts"
        ),
        Flag(group="server"),
    ] = False
    node_rank: Annotated[
        int,
        Meta(ge=0, description="with --headless: this host's number, from 1"),
        Flag(aliases=("-r",), group="server", metavar="N"),
    ] = 0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"],
        Meta(description="least level that is logged"),
        Flag(aliases=("--uvicorn-log-level",), group="server"),
    ] = "warning"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="logs as text, or a JSON object a line with the id of its request"),
        Flag(group="server"),
    ] = "text"
    enable_auto_tool_choice: Annotated[
        bool,
        Meta(
            description="allow the model to decide whether to call tools; requires "
            "--tool-call-parser, with which it is always on"
        ),
        Flag(group="chat"),
    ] = False


def make_parser() -> Parser:
    parser = Parser(prog="jackfield serve", description="Serve a model over HTTP, as OpenAI does.")
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="",
        help="checkpoint folder or hub name; none: the embedded one",
    )
    parser.add_argument("--model", dest="model_flag", help=argparse.SUPPRESS)
    server, *_ = (parser.add_argument_group(*group) for group in GROUPS.items())
    for options in (Listen, ServeOptions, ServerOptions):
        add_flags(parser, options)
    add_config(server)
    server.add_argument(
        "--explain",
        action="store_true",
        help="print what each flag becomes, those of vLLM and SGLang among them, and start nothing",
    )
    add_engine_options(parser)
    parser.other_options = sglang_options() | vllm_options()
    parser.other_groups = VLLM_GROUPS
    parser.common = COMMON
    return parser


class Settings(NamedTuple):
    config: EngineConfig
    plugins: Plugins
    listen: Listen
    options: ServerOptions
    fronts: int
    argv: list[str]
    """Command line, including the configuration file's flags."""
    node_rank: int = 0
    """Above 0: only to run this host's ranks."""


def settings(argv: list[str], *, remarks: bool = True) -> Settings:
    """Parse, check, load plugins, set up logging. Raises ConfigError, PluginError.

    remarks: log flags without effect.
    """
    parser = make_parser()
    lines, argv = whole_command(parser, argv)
    args = parser.parse_args(argv)
    serve = from_flags(ServeOptions, args)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(serve.log_format))
    logging.basicConfig(level=serve.log_level.upper(), handlers=[handler])
    for sentence in without_effect(lines) if remarks else ():
        logger.warning("%s", sentence)
    config = _with_profile_folder(engine_config(args, args.model_flag or args.model))
    check_host(config, serve)
    if serve.enable_auto_tool_choice:
        check_tool_parser(config)
    options = server_options(args)
    plugins = load_plugins(disable=config.disable_plugins)
    from ...core.metrics import stats_log
    from ..http import request_log

    request_log.set_up(options.access_log, options.log_requests, options.log_outputs)
    if options.log_outputs:
        shown = LoggedText(options.max_log_len, options.log_redact)
        plugins.add_plugin(OutputLog(shown), Provenance("jackfield", "", "log_outputs"))
    logs_stats = options.log_stats and serve.log_level not in ("error", "critical")
    stats_log.logger.setLevel(logging.INFO if logs_stats else logging.ERROR)
    return Settings(
        config, plugins, listen(args), options, serve.api_server_count, argv, serve.node_rank
    )


def whole_command(parser: Parser, argv: list[str]) -> tuple[list[Line], list[str]]:
    """Return what environment, command line and --config's file become, and the words of the latter
    two after those of the environment. Raises ConfigError.
    """
    variables = list(environment_lines(os.environ))
    for line in variables:
        if line.state == "refused":
            raise ConfigError(f"{line.given[0]}: {line.note}", param=line.flag)
    args = parser.parse_args(argv)
    if args.config is not None:
        argv = without_config(with_config(parser, argv, args))
    from_variables = [word for line in variables for word in line.words]
    return [*variables, *translated(parser, argv)], [*from_variables, *argv]


def without_effect(lines: Iterable[Line]) -> Iterable[str]:
    """Return a sentence for each flag that changes nothing."""
    sentences = (f"{each.flag} has no effect: {each.note}" for each in lines if each.note)
    return dict.fromkeys(sentences)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Return the server's options with the environment's keys; key files are checked.

    Raises ConfigError, with a file's line.
    """
    from ..http.auth.api_keys import read_keys

    options = from_flags(ServerOptions, args)
    keys = [key.strip() for key in options.api_keys]
    for name in KEY_VARIABLES:
        if (text := os.environ.get(name)) is not None:
            keys += _listed_keys(name, text)
    for path in options.api_key_files:
        read_keys(path)
    return dataclasses.replace(options, api_keys=tuple(dict.fromkeys(keys)))


def _with_profile_folder(config: EngineConfig) -> EngineConfig:
    """Return a configuration with the environment's folder of profiles, if it has none."""
    profiles, folder = config.profiler_config, os.environ.get(PROFILE_VARIABLE)
    if not folder or profiles.torch_profiler_dir:
        return config
    profiles = msgspec.structs.replace(profiles, torch_profiler_dir=folder)
    return msgspec.structs.replace(config, profiler_config=profiles)


def _listed_keys(variable: str, text: str) -> list[str]:
    """Return an environment variable's comma-separated keys. Raises ConfigError without any: an
    unset secret must not open the server.
    """
    keys = [key for part in text.split(",") if (key := part.strip())]
    if not keys:
        raise ConfigError(f"{variable}: is set to no key; unset it to serve without keys")
    return keys


def listen(args: argparse.Namespace) -> Listen:
    """Return where to listen. Raises ConfigError."""
    place = from_flags(Listen, args)
    if place.tls is not None:
        place.tls.context()  # Report invalid files before a model is loaded.
        return place
    for field in fields_of(Tls):
        if getattr(args, field.dest):
            raise ConfigError(f"{field.option}: needs --ssl-certfile", param=field.dest)
    return place


def check_host(config: EngineConfig, serve: ServeOptions) -> None:
    """Raise ConfigError if `headless`, `node_rank` and `nnodes` do not go together."""
    if serve.node_rank >= config.nnodes:
        raise ConfigError(
            f"--node-rank: hosts are numbered from 0, and --nnodes is {config.nnodes}",
            param="node_rank",
        )
    if serve.headless and not serve.node_rank:
        raise ConfigError(
            "--headless: the first host has the engine, which serves; give the others "
            "--node-rank 1 and so on",
            param="headless",
        )
    if serve.node_rank and not serve.headless:
        raise ConfigError(
            "--node-rank: only the first host serves; add --headless on the others",
            param="node_rank",
        )


def check_tool_parser(config: EngineConfig) -> None:
    """Raise ConfigError without a tool parser, in options or checkpoint."""
    from ...core.engine.resolve_config import NONE
    from ...core.loading.checkpoint_folder import checkpoint_folder
    from ...core.loading.dialects import read_dialects

    name = config.tool_call_parser
    if name is None:
        folder = checkpoint_folder(config.model, config.revision, config.download_dir)
        name = read_dialects(folder).tool_call_parser
    if name in (None, NONE):
        raise ConfigError(
            "--enable-auto-tool-choice: needs --tool-call-parser", param="enable_auto_tool_choice"
        )

"""Options of the server; their annotations define the flags of `jackfield serve`. Names are vLLM's.

Does not import aiohttp, so that flags can be parsed first.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from ..flags.dataclass_flags import Flag
from ..flags.values import non_empty
from .connection_limits import MAX_JSON_VALUES, ConnectionLimits

MAX_LIVE_LOGPROBS = 1 << 25


@dataclass(frozen=True)
class Cors:
    """What other sites' pages may do. `*` stands for all; header names in any case."""

    origins: Annotated[
        tuple[str, ...],
        Meta(
            description="sites whose pages may talk to the server; * for all (default: none); "
            "words, or a JSON list"
        ),
        Flag("--allowed-origins", metavar="ORIGIN"),
    ] = ()
    methods: Annotated[
        tuple[str, ...],
        Meta(description="methods they may use (default: all); words, or a JSON list"),
        Flag("--allowed-methods", metavar="METHOD", parse=str.upper),
    ] = ("*",)
    headers: Annotated[
        tuple[str, ...],
        Meta(description="headers they may send (default: all); words, or a JSON list"),
        Flag("--allowed-headers", metavar="HEADER"),
    ] = ("*",)
    credentials: Annotated[
        bool, Meta(description="those pages may send cookies"), Flag("--allow-credentials")
    ] = False

    def allows(self, origin: str) -> bool:
        return "*" in self.origins or origin in self.origins


def _folder(text: str) -> Path:
    return Path(non_empty(text))


@dataclass(frozen=True)
class BatchOptions:
    folder: Annotated[
        Path,
        Meta(description="serve /v1/files and /v1/batches, and keep both in this folder"),
        Flag("--batch-dir", group="batches", metavar="FOLDER", parse=_folder),
    ]
    max_file_bytes: Annotated[
        int,
        Meta(ge=1, description="refuse larger files"),
        Flag("--batch-max-file-bytes", group="batches", metavar="BYTES"),
    ] = 200 << 20
    max_store_bytes: Annotated[
        int,
        Meta(ge=1, description="refuse files when all together are larger"),
        Flag("--batch-max-store-bytes", group="batches", metavar="BYTES"),
    ] = 10 << 30
    max_concurrency: Annotated[
        int | None,
        Meta(
            ge=1,
            description="most requests of batches running at once; default: half of max_num_seqs",
        ),
        Flag("--batch-max-concurrency", group="batches", metavar="N"),
    ] = None


def _root_path(text: str) -> str:
    path = text.rstrip("/")
    if path and not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"must begin with /, got {path!r}")
    return path


def _pattern(text: str) -> str:
    try:
        re.compile(non_empty(text))
    except re.error as error:
        message = f"{text!r} is no regular expression: {error}"
        raise argparse.ArgumentTypeError(message) from None
    return text


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server. Fields without a flag are set by the server."""

    api_keys: Annotated[
        tuple[str, ...],
        Meta(
            description="key that clients must send; repeatable; also from JACKFIELD_API_KEY, "
            "VLLM_API_KEY"
        ),
        Flag("--api-key", group="server", repeated=True, parse=non_empty),
    ] = ()
    max_completions_per_request: Annotated[
        int,
        Meta(ge=1, description="completions that one request may start: prompts times n"),
        Flag(group="server", metavar="N"),
    ] = 1024
    max_stored_responses: Annotated[
        int,
        Meta(
            ge=0, description="number of /v1/responses to keep in memory, the newest ones; 0: none"
        ),
        Flag(group="server"),
    ] = 1000
    max_stored_response_bytes: Annotated[
        int,
        Meta(ge=0, description="drop the oldest responses when all of them together are larger"),
        Flag(group="server"),
    ] = 256 << 20
    max_body_bytes: Annotated[
        int, Meta(ge=1, description="refuse larger requests"), Flag(group="server")
    ] = 32 << 20
    max_audio_bytes: Annotated[
        int, Meta(ge=1, description="refuse larger recordings"), Flag(group="server")
    ] = 25 << 20
    enable_plugins_route: Annotated[
        bool,
        Meta(description="serve GET /v1/plugins: what is plugged in, and whether it works here"),
        Flag(group="server"),
    ] = False
    playground: Annotated[
        bool, Meta(description="serve a page for people at /"), Flag(group="server")
    ] = True
    trust_request_chat_template: Annotated[
        bool,
        Meta(description="allow chats to bring their own template (chat_template)"),
        Flag(group="server"),
    ] = False
    shutdown_timeout: Annotated[
        float, Meta(description="seconds to drain after SIGTERM"), Flag(group="server")
    ] = 60.0
    enable_admin: Annotated[
        bool,
        Meta(
            description="serve POST /reset_prefix_cache, /compact_kv_cache, /start_profile, "
            "/stop_profile and GET /server_info, routes that pause the engine and change its "
            "weights, and with --enable-lora routes that load and unload adapters"
        ),
        Flag(group="server"),
    ] = False
    tokenizer_info: Annotated[
        bool,
        Meta(description="serve GET /tokenizer_info: chat templates and special tokens"),
        Flag("--enable-tokenizer-info-endpoint", group="server", paired=True),
    ] = False
    batches: BatchOptions | None = None
    """None: no file and batch routes."""
    api_key_files: Annotated[
        tuple[Path, ...],
        Meta(
            description="file with an API key a line, or its name, digest and limits (`jackfield "
            "keys`); read again on SIGHUP; repeatable"
        ),
        Flag("--api-key-file", metavar="PATH", repeated=True),
    ] = ()
    share_prefix_cache: Annotated[
        bool,
        Meta(
            description="keys and a plugin's tenants use prefixes that others have cached, which "
            "tells them what others sent (default: each has its own)"
        ),
        Flag(paired=True),
    ] = False
    cors: Cors = field(default_factory=Cors)
    allowed_hosts: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="names under which the server may be reached, *.NAME for all below, * for "
            "all; an address always may be (default: localhost for a server on a loopback address "
            "without keys, otherwise all)"
        ),
        Flag(metavar="HOST"),
    ] = None
    """None: `cross_site.default_hosts` without keys, else all."""
    root_path: Annotated[
        str,
        Meta(description="where a proxy, which takes the prefix off, shows the server"),
        Flag(metavar="PATH", parse=_root_path),
    ] = ""
    request_id_headers: Annotated[
        bool,
        Meta(
            description="X-Request-Id on every response: the request's own, or a new one "
            "(default: on)"
        ),
        Flag("--enable-request-id-headers"),
    ] = True
    docs: Annotated[
        bool,
        Meta(description="serve neither /docs nor /openapi.json"),
        Flag("--disable-docs", aliases=("--disable-fastapi-docs",), turns_off=True),
    ] = True
    max_concurrency: Annotated[
        int | None,
        Meta(
            ge=1,
            description="most requests in flight; further ones get a 503 (default: no limit)",
        ),
        Flag("--limit-concurrency", metavar="N"),
    ] = None
    """Open routes do not count."""
    max_waiting: Annotated[
        int | None,
        Meta(
            ge=0,
            description="inference requests that may wait for the engine; further ones get a 503; "
            "0: no limit (default: one for two of --max-num-seqs, or of those that fit in the KV "
            "cache, and at least 128; no limit with --limit-concurrency or --max-waiting-requests)",
        ),
        Flag("--limit-waiting", metavar="N"),
    ] = None
    """Those of batches wait on their own side."""
    max_live_logprobs: Annotated[
        int,
        Meta(
            ge=0,
            description="log-probabilities that running requests may get in all, or "
            "--max-logprobs-per-request if that is more; further requests get a 503; 0: no limit",
        ),
        Flag("--limit-logprobs", metavar="N"),
    ] = MAX_LIVE_LOGPROBS
    """Of each front end."""
    max_json_values: Annotated[
        int,
        Meta(
            ge=1,
            description="refuse bodies with more values; an array or object counts as 8, a key "
            "as 24",
        ),
        Flag(metavar="N"),
    ] = MAX_JSON_VALUES
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    metrics_prefix: Annotated[
        Literal["jackfield", "vllm", "both"],
        Meta(
            description="prefix of the metrics at /metrics: with vllm, dashboards for vLLM "
            "find them"
        ),
    ] = "jackfield"
    access_log: Annotated[
        Literal["off", "text", "json"],
        Meta(description="a line a request, to standard error (default: off)"),
    ] = "off"
    access_log_except: Annotated[
        tuple[str, ...],
        Meta(description="paths that get no line, such as /health,/metrics; words, or with commas"),
        Flag("--disable-access-log-for-endpoints", metavar="PATH"),
    ] = ()
    log_requests: Annotated[
        bool,
        Meta(description="log the bodies of requests, prompts included (default: off)"),
        Flag("--enable-log-requests", paired=True),
    ] = False
    log_outputs: Annotated[
        bool,
        Meta(description="log the text that each request gave (default: off)"),
        Flag("--enable-log-outputs", paired=True),
    ] = False
    max_log_len: Annotated[
        int | None,
        Meta(ge=0, description="most characters of a body or output to log (default: all)"),
        Flag(metavar="N"),
    ] = None
    log_redact: Annotated[
        tuple[str, ...],
        Meta(
            description="regular expression whose matches in logged bodies and outputs are left "
            "out; with it at most 65536 characters of each are logged; repeatable"
        ),
        Flag("--log-redact", repeated=True, metavar="REGEX", parse=_pattern),
    ] = ()
    log_stats: Annotated[
        bool,
        Meta(
            description="log no lines about throughput, requests and the KV cache while requests "
            "run"
        ),
        Flag("--disable-log-stats", turns_off=True),
    ] = True
    """Not with a log level of error or critical."""
    log_stats_interval: Annotated[
        float,
        Meta(gt=0, le=86400, description="seconds between these lines"),
        Flag(metavar="SECONDS"),
    ] = 10.0
    sse_keep_alive_interval: Annotated[
        float,
        Meta(
            ge=0,
            description="seconds without an event after which a stream gets a comment, so that "
            "proxies keep its connection; 0: none. Where the first output takes longer, the "
            "status is sent before it, and a later refusal is an event (default: 0)",
        ),
        Flag(metavar="SECONDS"),
    ] = 0.0
    force_include_usage: Annotated[
        bool,
        Meta(description="end every stream with its usage, as stream_options.include_usage does"),
        Flag("--enable-force-include-usage", paired=True),
    ] = False
    tokens_as_token_ids: Annotated[
        bool,
        Meta(
            description="write tokens of log-probabilities as token_id:N, unless a request sets "
            "return_tokens_as_token_ids itself"
        ),
        Flag("--return-tokens-as-token-ids", paired=True),
    ] = False
    response_role: Annotated[
        str,
        Meta(description="role of the responses (default: assistant)"),
        Flag(group="chat", parse=non_empty),
    ] = "assistant"

    keeps_at: Path | None = None
    """Unix socket for serving stateful routes to other front ends (`server/stateful_proxy.py`)."""
    kept_at: Path | None = None
    """Unix socket of the front end with the stateful routes, if another."""
    num_fronts: int = 1
    """Processes that serve the same clients."""
    front: int = 0
    """This one's index."""
    usage_at: Path | None = None
    """File of the processes' usage counts; None for one process."""
    started: int = field(default_factory=lambda: int(time.time()))
    """Unix time in seconds."""

    @property
    def keyed(self) -> bool:
        return bool(self.api_keys or self.api_key_files)

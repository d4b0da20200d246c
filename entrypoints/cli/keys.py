"""`jackfield keys`: API keys for `serve --api-key-file`, which holds their digests alone."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

import msgspec

from ...core.errors import ConfigError
from ...core.tenancy import TenantLimits
from ..flags.engine_flags import fail
from ..flags.parser import Parser
from ..flags.values import positive_int


def run(argv: list[str]) -> int:
    parser = Parser(prog="jackfield keys", description=__doc__)
    commands = parser.add_subparsers(
        dest="command", required=True, parser_class=Parser, help="new: a new key; add: one you have"
    )
    new = commands.add_parser("new", help="create a key, and the line for its file")
    add = commands.add_parser("add", help="create the line for a key from standard input")
    for command in (new, add):
        command.add_argument("name", help="of who has the key; keys of one name are one owner's")
        command.add_argument(
            "--file", metavar="PATH", help="append the line; otherwise it is printed"
        )
        command.add_argument(
            "--max-concurrency", type=positive_int, metavar="N", help="requests at once"
        )
        command.add_argument(
            "--requests-per-minute", type=positive_int, metavar="N", help="requests per minute"
        )
        command.add_argument(
            "--max-tokens", type=positive_int, metavar="N", help="tokens of an answer"
        )
        command.add_argument(
            "--adapter",
            action="append",
            metavar="NAME",
            help="an adapter it may use, of those that all may; repeatable; default: all",
        )
        command.add_argument(
            "--adapter-folder",
            metavar="PATH",
            help="folder on the server from which it may load adapters of its own",
        )
        command.add_argument(
            "--max-adapters",
            type=positive_int,
            metavar="N",
            default=TenantLimits().max_adapters,
            help="adapters of its own at once (default: %(default)s)",
        )
        command.add_argument(
            "--manages-adapters",
            action="store_true",
            help="it may load adapters for all, from anywhere, and unload them",
        )
        command.add_argument(
            "--manages-engine",
            action="store_true",
            help="it may pause the engine, and change its weights",
        )
    args = parser.parse_args(argv)
    try:
        return _make(args)
    except (ConfigError, OSError) as error:
        return fail(error)


def _make(args: argparse.Namespace) -> int:
    from ..http.auth.api_keys import PREFIX, KeyEntry, digest_of

    key = f"jf-{secrets.token_urlsafe(32)}" if args.command == "new" else sys.stdin.read().strip()
    if not key:
        raise ConfigError("keys add: standard input contains no key")
    if not 0 < len(args.name) <= 128:
        raise ConfigError(f"keys: a name has 1 to 128 characters, got {len(args.name)}")
    entry = KeyEntry(
        name=args.name,
        digest=PREFIX + digest_of(key).hex(),
        max_concurrency=args.max_concurrency,
        requests_per_minute=args.requests_per_minute,
        max_tokens=args.max_tokens,
        adapters=None if args.adapter is None else tuple(args.adapter),
        adapter_folder=args.adapter_folder,
        max_adapters=args.max_adapters,
        manages_adapters=args.manages_adapters,
        manages_engine=args.manages_engine,
    )
    line = msgspec.json.encode(entry).decode()
    if args.file is None:
        print(line)
        if args.command == "new":
            print(f"the key, which is shown once: {key}", file=sys.stderr)
        return 0
    path = Path(args.file)
    if not path.exists():
        path.touch(mode=0o600)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    if args.command == "new":
        print(key)
    return 0

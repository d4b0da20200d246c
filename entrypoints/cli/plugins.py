"""`jackfield plugins`: what is plugged in, and `jackfield plugins new`: a plugin of one's own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

import msgspec

from ...core.errors import ConfigError, PluginError
from ...core.registry import load_plugins
from ..inventory import Row, inventory
from .options import Parser, add_no_plugin, fail
from .skeleton import KINDS, write_skeleton


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jackfield plugins",
        description="List what is plugged in, and whether it works here; or, with "
        "`jackfield plugins new KIND NAME`, write the package of a new plugin.",
    )
    parser.add_argument(
        "action", nargs="?", choices=("list", "new"), default="list", help="what to do"
    )
    parser.add_argument("kind", nargs="?", help=f"new: what to plug in: {', '.join(KINDS)}")
    parser.add_argument(
        "name", nargs="?", help="new: the name to register; a model's is its architecture"
    )
    listing = parser.add_argument_group("list")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="import each one, to see if it works; off: import none",
    )
    add_no_plugin(listing)
    new = parser.add_argument_group("new")
    new.add_argument(
        "--into", default=".", metavar="FOLDER", help="where the package's folder goes"
    )
    return parser


def run(argv: list[str], commands: Collection[str] = ()) -> int:
    """`commands`: those of `jackfield` itself, whose names a plugin's cannot have.

    → exit status: 0; 1 when plugins clash or nothing can be written; 2 for wrong usage."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        if args.action == "new":
            if not args.kind or not args.name:
                parser.error("new: give a KIND and a NAME")
            _check_free(args.kind.replace("_", "-"), args.name, args.no_plugin, commands)
            return _new(args.kind, args.name, Path(args.into))
        if args.kind:
            parser.error(f"unrecognized argument: {args.kind}")
        rows = inventory(load_plugins(disable=args.no_plugin), check=args.check)
    except (ConfigError, OSError) as error:
        return fail(error)
    except PluginError as error:
        print(f"jackfield: {error}", file=sys.stderr)
        return 1
    print(msgspec.json.format(msgspec.json.encode(rows)).decode() if args.json else as_text(rows))
    return 0


def as_text(rows: list[Row]) -> str:
    """In columns."""
    columns = Row.__struct_fields__
    cells = [columns, *([getattr(row, column) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _check_free(kind: str, name: str, without: list[str], commands: Collection[str]) -> None:
    """Two plugins of one name stop every command. Raises ConfigError."""
    if kind not in KINDS:
        return  # Refused by `write_skeleton`.
    owners = {
        entry.name: entry.provenance.distribution
        for entry in load_plugins(disable=without)[kind.replace("-", "_")].entries()
    }
    if kind == "command":
        owners |= dict.fromkeys(commands, "jackfield")
    if name in owners:
        raise ConfigError(
            f"NAME: {name!r} is a {kind.replace('-', ' ')} of {owners[name]} already; take "
            "another name",
            param="name",
        )


def _new(kind: str, name: str, into: Path) -> int:
    folder = write_skeleton(kind, name, into)
    print(f"wrote {folder}: its README says how to install it and run its tests")
    return 0

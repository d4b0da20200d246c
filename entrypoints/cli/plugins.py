"""`jackfield plugins`: what is plugged in, or one plugin whole; and `jackfield plugins new`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import ConfigError, PluginError
from ...core.registration.plugin_checks import near
from ...core.registry import Plugins, load_plugins
from ..flags.engine_flags import add_no_plugin, fail
from ..flags.parser import Parser
from ..inventory import Row, inventory, output_aside
from ..struct_fields import FieldText, fields_of
from .skeleton import KINDS, write_skeleton

COLUMNS = ("kind", "name", "distribution", "version", "status")


class Detail(msgspec.Struct, frozen=True):
    plugin: str
    distribution: str
    version: str
    rows: list[Row]
    options: dict[str, list[FieldText]]
    """Name of the options' setting → options."""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jackfield plugins",
        description="List what is plugged in, and whether it works here; with `jackfield plugins "
        "NAME`, all of one plugin with its options; with `jackfield plugins new KIND NAME`, write "
        "the package of a new one.",
    )
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        help="`list`; `new`; or a plugin by its entry point, distribution or the name of its "
        "options",
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


def run(argv: list[str]) -> int:
    """Return 0; 1 if plugins clash or writing fails; 2 for wrong usage."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        if args.action == "new":
            if not args.kind or not args.name:
                parser.error("new: give a KIND and a NAME")
            _check_free(args.kind.replace("_", "-"), args.name, args.no_plugin)
            return _new(args.kind, args.name, Path(args.into))
        if args.kind:
            parser.error(f"unrecognized argument: {args.kind}")
        with output_aside():
            plugins = load_plugins(disable=args.no_plugin)
            rows = inventory(plugins, check=args.check)
            details = None if args.action == "list" else _details(plugins, rows, args.action)
    except (ConfigError, OSError) as error:
        return fail(error)
    except PluginError as error:
        print(f"jackfield: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(
            msgspec.json.format(msgspec.json.encode(rows if details is None else details)).decode()
        )
    else:
        print(as_text(rows) if details is None else "\n\n".join(map(_described, details)))
    return 0


def _details(plugins: Plugins, rows: list[Row], name: str) -> list[Detail]:
    """Return the plugins of this name; raises ConfigError without one."""
    details, names_seen = [], set()
    for plugin in plugins.loaded.values():
        where = plugin.provenance
        schemas = [e.name for e in plugins["options"].entries() if e.provenance == where]
        names = {where.entry_point, where.distribution, *schemas}
        names_seen |= names
        if _normal(name) not in map(_normal, names):
            continue
        mine = [
            row
            for row in rows
            if (row.distribution, row.plugin) == (where.distribution, where.entry_point)
        ]
        options = {schema: fields_of(plugins["options"].load(schema)) for schema in schemas}
        details.append(Detail(where.entry_point, where.distribution, where.version, mine, options))
    if not details:
        raise ConfigError(f"NAME: no plugin {name!r} here{near(name, names_seen)}", param="name")
    return details


def _normal(name: str) -> str:
    return name.replace("_", "-").lower()


def _described(detail: Detail) -> str:
    lines = [f"{detail.plugin} of {detail.distribution} {detail.version}", "", as_text(detail.rows)]
    for name, fields in detail.options.items():
        head = [f"options, as --plugin-option {name}.KEY=VALUE", ""]
        lines += ["", *head, _columns(fields, FieldText.__struct_fields__)]
    return "\n".join(lines)


def as_text(rows: list[Row]) -> str:
    return _columns(rows, COLUMNS)


def _columns(rows: Any, columns: tuple[str, ...]) -> str:
    cells = [columns, *([getattr(row, column) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _check_free(kind: str, name: str, without: list[str]) -> None:
    """Raise ConfigError for a used name: a duplicate stops every command."""
    if kind not in KINDS:
        return  # `write_skeleton` refuses the kind.
    plugin = KINDS[kind].plugin or kind
    with output_aside():
        entries = load_plugins(disable=without)[plugin.replace("-", "_")].entries()
    owners = {entry.name: entry.provenance.distribution for entry in entries}
    if name in owners:
        raise ConfigError(
            f"NAME: {name!r} is a {plugin.replace('-', ' ')} of {owners[name]} already; take "
            "another name",
            param="name",
        )


def _new(kind: str, name: str, into: Path) -> int:
    folder = write_skeleton(kind, name, into)
    print(f"wrote {folder}: its README says how to install it and run its tests")
    return 0

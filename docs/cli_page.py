"""docs/reference/cli.md: every command and flag, from the parsers that read them."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from markdown_table import table

from jackfield.entrypoints.cli.main import COMMANDS
from jackfield.entrypoints.flags.parser import Parser


class _Caught(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def command_parser(command: Callable[[list[str]], int]) -> argparse.ArgumentParser | str:
    """The parser that a command makes; what it prints, if it makes none."""

    def catch(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Caught(self)

    clean = {k: v for k, v in os.environ.items() if not k.startswith("JACKFIELD_")}
    printed = io.StringIO()
    try:
        with (
            mock.patch.object(Parser, "parse_args", catch),
            mock.patch.dict(os.environ, clean, clear=True),
            contextlib.redirect_stdout(printed),
        ):
            command(["--help"])
    except _Caught as caught:
        return caught.parser
    return printed.getvalue()


def cli() -> str:
    """Every command and flag."""
    parts = [
        "# Command line\n\n",
        "Every command and flag. `jackfield COMMAND [options]`; "
        "`python -m jackfield` is the same. "
        "Plugins may add commands (`register_commands`, see [hooks](hooks.md)). "
        "Exit status: 0 done, 1 failed, 2 wrong usage or configuration. "
        "`--help=WORD` explains one option, a group of options, or all that contain the word "
        "(`--help=max-num-seqs`, `--help=scheduling`), `--help=listgroup` lists the groups, and "
        "`--help=all` explains everything. Flags may be written with `_` instead of `-`. "
        "Whole numbers of the engine may end in k, m, g or t for powers of 1,000, and in "
        "K, M, G or T for powers of 1,024: `--max-model-len 32K`.\n\n",
        table(["command", "does"], [[f"`jackfield {n}`", t] for n, (_, t) in COMMANDS.items()]),
    ]
    for name, (command, _) in COMMANDS.items():
        parser = command_parser(command)
        parts.append(f"\n## jackfield {name}\n\n")
        if isinstance(parser, str):
            parts.append(f"```text\n{parser.strip()}\n```\n")
            continue
        parts.append(f"{parser.description}\n")
        for group in parser._action_groups:
            actions = [a for a in group._group_actions if a.help is not argparse.SUPPRESS]
            actions = [a for a in actions if a.dest != "help"]
            if not actions:
                continue
            title = group.title or ""
            parts.append(f"\n{title[:1].upper()}{title[1:]}:\n\n")
            parts.append(table(["argument", "meaning"], [_flag_row(a) for a in actions]))
    parts += [
        "\n## Flags of other servers\n\n",
        "`serve` takes those of vLLM, and the most used ones of SGLang: [what each becomes]"
        "(vllm-options.md). `jackfield serve --explain ...` prints it for a command line.\n",
    ]
    parts.append(
        "\n## Environment\n\n"
        + table(
            ["variable", "meaning"],
            [
                ["`JACKFIELD_API_KEY`", "`serve`: keys that clients must send, separated by "
                 "commas; `VLLM_API_KEY` as well. `chat`, `complete`: the key to send."],
                ["`JACKFIELD_URL`", "`chat`, `complete`: where the server is."],
                ["`NO_COLOR`", "`chat`: reasoning is not dim."],
                ["`JACKFIELD_PLUGINS`", "Load only these third-party plugins (entry points or "
                 "distributions, separated by commas), and stop if one of them fails; `builtin`: "
                 "none but Jackfield's own."],
            ],
        )
    )  # fmt: skip
    return "".join(parts)


def _flag_row(action: argparse.Action) -> list[str]:
    names = list(action.option_strings) or [action.dest.upper()]
    option = ", ".join(f"`{name}`" for name in names)
    if action.choices is not None:
        option += " " + " or ".join(f"`{choice}`" for choice in action.choices)
    elif action.option_strings and action.nargs != 0:
        value = action.metavar or action.dest.upper()
        option += f" `{value}{' …' if action.nargs == '+' else ''}`"
    text = (action.help or "").replace("%%", "%")
    if not text:
        raise SystemExit(f"{option} has no help text")
    if "default:" not in text and action.default not in (None, "", [], argparse.SUPPRESS, False):
        text = f"{text} (default: {action.default})".strip()
    return [option, text]

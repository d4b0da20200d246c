"""docs/reference/vllm-options.md: what each option and variable of vLLM becomes, and SGLang's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from markdown_table import table

from jackfield.entrypoints.flags.foreign_options import option_of
from jackfield.entrypoints.flags.parser import Parser
from jackfield.entrypoints.flags.sglang_flags import sglang_options
from jackfield.entrypoints.flags.vllm_environment import OTHERWISE, variable
from jackfield.entrypoints.flags.vllm_flags import NEUTRAL, vllm_options
from jackfield.entrypoints.server.serve_settings import make_parser

LISTS = Path(__file__).resolve().parent.parent / "tests" / "entrypoints"


def options() -> str:
    """Every option of vLLM 0.33.0, those of earlier versions, SGLang's and variables."""
    parser = make_parser()
    names = [_names(line) for line in (LISTS / "vllm_options.txt").read_text().splitlines()]
    known = {name for each in names for name in each}
    earlier = [flag for flag in vllm_options() if flag not in known and flag.startswith("--")]
    rows = [row for each in names if (row := _row(parser, each)) is not None]
    counts = {state: sum(row[1] == state for row in rows) for state in dict.fromkeys(STATES)}
    return "".join(
        [
            "# Options of vLLM and SGLang\n\n",
            "What each option of `vllm serve` 0.33.0 becomes on the command line of `jackfield "
            "serve`. `jackfield serve --explain ...` prints it for a whole command line, and "
            "starts nothing. ",
            f"Of {len(rows)} options, {counts['same']} are the same, {counts['equivalent']} become "
            f"others, {counts['no effect']} have no effect and are logged once with the reason, "
            f"and {counts['refused']} are refused with what to use.\n\n",
            "`--no-x` and `--disable-x` turn off what `--x` and `--enable-x` turn on, and are "
            "taken where that is off anyway. A JSON value may be given key by key "
            "(`--compilation-config.level 3`, `--hf-overrides.rope_theta 1e6`, "
            "`--x.list+ a,b`). The file of `--config` takes the same names.\n\n",
            table(HEAD, rows),
            "\n## Options of earlier versions\n\n",
            table(HEAD, _rows(parser, earlier)),
            "\n## SGLang's options\n\n",
            "Those of `python -m sglang.launch_server` 0.5.23 that are most used and that vLLM has "
            "not; the others of the same name as above are the same.\n\n",
            table(
                HEAD, [row for flag in sorted(sglang_options()) if (row := _row(parser, [flag]))]
            ),
            "\n## vLLM's environment variables\n\n",
            "A variable is a flag's value; the command line and `--config` take precedence. "
            f"Variables that are not in the table have no effect: {OTHERWISE}.\n\n",
            table(["variable", "state", "here"], _variables()),
        ]
    )


HEAD = ["option", "state", "here"]
STATES = ("same", "equivalent", "no effect", "refused")


def _names(line: str) -> list[str]:
    return line.partition(" / ")[0].split()[1:]


def _rows(parser: Parser, flags: Iterable[str]) -> list[list[str]]:
    return [row for flag in sorted(flags) if (row := _row(parser, [flag])) is not None]


def _row(parser: Parser, names: list[str]) -> list[str] | None:
    state, text = option_of(parser, names[0])
    if state == "unknown":
        return None
    own = parser._option_string_actions.get(names[0])
    if own is not None and names[0] not in own.option_strings[:1]:
        text = text or f"`{own.option_strings[0]}`"
    if neutral := NEUTRAL.get(names[0]):
        text += f" (has no effect as {' or '.join(f'`{value}`' for value in neutral)})"
    return [", ".join(f"`{name}`" for name in names), state, text]


def _variables() -> list[list[str]]:
    rows = []
    for name in (LISTS / "vllm_variables.txt").read_text().split():
        known = variable(name)
        if known.text != OTHERWISE:
            rows.append([f"`{name}`", known.state, known.text])
    return rows

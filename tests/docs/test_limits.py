"""docs/reference/limits.md against the code: each flag and constant is there, with its default."""

from __future__ import annotations

import ast
import re
from functools import reduce
from typing import Any

import pytest
from pages import ROOT

from jackfield import EngineConfig
from jackfield.entrypoints.server.serve_settings import make_parser

PAGE = (ROOT / "docs/reference/limits.md").read_text()
HEAD = "| what | default | flag | what the client gets |"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and line != HEAD and not line.startswith("|---")
]
UNITS = {"": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
PARSER = make_parser()


def shown(default: str) -> float | None:
    """`32 MiB` → bytes; `none` → None."""
    if default == "none":
        return None
    number, _, unit = default.partition(" ")
    return float(number) * UNITS[unit]


def of_flag(flag: str) -> Any:
    """What `jackfield serve` takes without the flag."""
    action = PARSER._option_string_actions[flag]
    fields = action.dest.split(".")
    if fields[0] in EngineConfig.__struct_fields__:
        return reduce(getattr, fields, EngineConfig())
    return action.default


def of_constant(path: str, name: str) -> Any:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            return eval(compile(ast.Expression(node.value), path, "eval"), {})
    raise AssertionError(f"{path} has no {name}")


def test_the_page_has_one_form() -> None:
    assert PAGE.count("|---|---|---|---|") == PAGE.count(HEAD)
    assert len(ROWS) > 30
    for row in ROWS:
        assert len(row) == 4 and all(row), row


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:40] for row in ROWS])
def test_a_limit_is_what_the_page_says(row: list[str]) -> None:
    what, default, holder, _ = row
    if match := re.fullmatch(r"`(--[\w.-]+)`", holder):
        assert of_flag(match[1]) == shown(default), what
    else:
        match = re.fullmatch(r"`([\w/]+\.py)` `([A-Z_]+)`", holder)
        assert match is not None, f"{what}: neither a flag nor a constant: {holder}"
        assert of_constant(match[1], match[2]) == shown(default), what

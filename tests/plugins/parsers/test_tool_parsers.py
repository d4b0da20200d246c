"""Every tool parser in the box has its case in a file beside this one; odd tools break none."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from tool_kit import Kit

from jackfield.core.registry import load_plugins


def test_every_tool_parser_in_the_box_is_here() -> None:
    here = {
        kit.name
        for file in Path(__file__).parent.glob("test_*_parsers.py")
        for kit in vars(importlib.import_module(file.stem)).values()
        if isinstance(kit, type) and issubclass(kit, Kit) and "name" in vars(kit)
    }
    plugins = load_plugins()
    built_in = {
        entry.name
        for entry in plugins["tool_parser"].entries()
        if entry.provenance.distribution == "jackfield"
    }
    assert here == built_in


@pytest.mark.parametrize("tools", [[], [{}], [{"function": None}], [{"function": {"name": "f"}}],
                                   [{"function": {"name": "f", "parameters": "odd"}}]])  # fmt: skip
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "xlam"])
def test_odd_tools_do_not_break_a_parser(name: str, tools: list[dict[str, object]]) -> None:
    parser = load_plugins()["tool_parser"].load(name)(tools=tools)
    text = "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call><function=f>\n"
    parser.feed(text + "<parameter=a>1</parameter></function>")
    parser.finish()

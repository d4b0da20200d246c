"""Whether a chat template reads a message's content as a list of parts.

Templates of multimodal models often loop over `message.content`, and write nothing of content that
is a string. Those that ask what content is (`is string`) take both.
"""

from __future__ import annotations

from jinja2 import nodes

ASKING = frozenset({"string", "iterable", "sequence", "mapping"})
"""Tests by which a template tells content of both kinds apart."""
PASSING = frozenset({"list", "map", "reject", "rejectattr", "select", "selectattr"})
"""Filters whose result has the items of what they are applied to."""


def reads_parts(template: nodes.Template) -> bool:
    """Return whether a parsed template loops over content and never asks what it is."""
    if any(test.name in ASKING for test in template.find_all(nodes.Test)):
        return False
    names = {
        node.target.name
        for node in template.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, frozenset())
    }
    return any(_is_content(loop.iter, frozenset(names)) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    """`names`: of variables that are a message's content."""
    while isinstance(node, nodes.Filter) and node.name in PASSING:
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == "content"
    )

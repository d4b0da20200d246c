"""What a chat template accepts: content in parts, null content, marks that it searches.

Found in the syntax tree, or by rendering a small conversation in both forms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from jinja2 import nodes

from .chat_messages import item_part

_WORD = "jackdaw"
"""Content in the small conversations."""
_ID = "a1b2c3d4e"
_TOOL = {
    "type": "function",
    "function": {
        "name": _WORD,
        "description": _WORD,
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_OF_TOOL = {"name": _WORD, "tool_call_id": _ID}
_CALL = {"id": _ID, "type": "function", "function": {"name": _WORD, "arguments": {}}}
_SEARCHES = frozenset({"split", "rsplit", "partition", "rpartition", "startswith", "endswith"})
"""Text methods by which templates split content."""

Run = Callable[[dict[str, Any]], str | None]
"""Renders variables; None if refused."""


ContentFormat = Literal["auto", "string", "openai"]
"""How templates get content: as a text, as parts, or as they take it."""


class TemplateTraits:
    """A template's traits, found lazily."""

    def __init__(
        self, tree: Callable[[], nodes.Template], run: Run, content_format: ContentFormat = "auto"
    ) -> None:
        self._tree = tree
        self._run = run
        self._content_format = content_format
        self._parts: dict[str, tuple[bool, bool]] = {}
        self._items: dict[str, bool] = {}

    def takes_parts(self, role: str) -> bool:
        """Whether content of this role may be a list of parts, all written."""
        return self._about_parts(role)[0]

    def needs_parts(self, role: str) -> bool:
        """Whether content of this role must be a list."""
        return self._about_parts(role)[1]

    def takes_item(self, role: str, modality: str, placeholder: str) -> bool:
        """Whether content of this role may have parts that stand for media, and each is written as
        the placeholder."""
        if not self.takes_parts(role):
            return False
        key = f"{role} {modality} {placeholder}"
        if key not in self._items:
            message = {"role": role, **(_OF_TOOL if role in ("tool", "function") else {})}
            part = item_part(modality)
            text = self._around({**message, "content": [part, *_parts(_WORD), part]})
            plain = self._around({**message, "content": _parts(_WORD)}) or ""
            written = text is not None and _WORD in text
            self._items[key] = (
                written and text.count(placeholder) == plain.count(placeholder) + 2  # type: ignore[union-attr]
            )
        return self._items[key]

    @functools.cached_property
    def takes_null(self) -> bool:
        """Whether content beside calls may be null: the template tests for that, and does not write
        it.
        """
        if not _asks_for_null(self._tree()):
            return False
        null = self._around({"role": "assistant", "content": None, "tool_calls": [_CALL]})
        empty = self._around({"role": "assistant", "content": "", "tool_calls": [_CALL]})
        return null is None or empty is None or null.count("None") <= empty.count("None")

    @functools.cached_property
    def searched(self) -> frozenset[str]:
        """Texts at which the template splits content, such as `</think>`."""
        texts = set()
        for call in self._tree().find_all(nodes.Call):
            if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHES:
                texts |= {
                    arg.value
                    for arg in call.args
                    if isinstance(arg, nodes.Const) and isinstance(arg.value, str)
                }
        return frozenset(texts)

    def _about_parts(self, role: str) -> tuple[bool, bool]:
        """Render content of this role as text, and in a part."""
        if self._content_format != "auto":
            return (self._content_format == "openai",) * 2
        if role not in self._parts:
            message = {"role": role, **(_OF_TOOL if role in ("tool", "function") else {})}
            first, second = _WORD * 2, _WORD[::-1] * 2
            text = self._around({**message, "content": first})
            one = self._around({**message, "content": _parts(first)})
            two = self._around({**message, "content": _parts(first, second)})
            # Some write the first part alone, some show parts as JSON or Python does.
            reads_one = one is not None and first in one and not _quotes_more(one, text)
            reads_two = two is not None and first in two and second in two
            writes_text = text is not None and first in text
            self._parts[role] = reads_one and reads_two, reads_one and not writes_text
        return self._parts[role]

    def _around(self, message: dict[str, Any]) -> str | None:
        """Render a message in a suitable conversation."""
        role, tools = message["role"], None
        if role == "user":
            chat = [message]
        elif message.get("tool_calls"):
            tools, chat = [_TOOL], [self._plain("user"), message, self._plain("tool")]
        elif role == "assistant":
            chat = [self._plain("user"), message, self._plain("user")]
        elif role in ("tool", "function"):
            calls = {**self._plain("assistant"), "tool_calls": [_CALL]}
            tools, chat = [_TOOL], [self._plain("user"), calls, message]
        else:
            chat = [message, *map(self._plain, ("user", "assistant", "user"))]
        return self._run({"messages": chat, "tools": tools, "add_generation_prompt": False})

    def _plain(self, role: str) -> dict[str, Any]:
        content = _parts(_WORD) if self.needs_parts(role) else _WORD
        return {"role": role, "content": content, **(_OF_TOOL if role == "tool" else {})}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _quotes_more(parts: str, text: str | None) -> bool:
    """Return whether a rendering shows a part as JSON or Python."""
    return any(parts.count(quoted) > (text or "").count(quoted) for quoted in ("'text'", '"text"'))


def _asks_for_null(tree: nodes.Template) -> bool:
    for test in tree.find_all(nodes.Test):
        if test.name == "none" and _is_content(test.node):
            return True
    for comparison in tree.find_all(nodes.Compare):
        values = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        if any(isinstance(v, nodes.Const) and v.value is None for v in values):
            if any(map(_is_content, values)):
                return True
    return False


def _is_content(node: nodes.Node) -> bool:
    """Return whether an expression is a message's content, or a variable of that name."""
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and "content" in node.name

"""Custom tools, as functions with one text argument."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from ....core.errors import InvalidRequest, shown
from ....core.grammars.tool_calls.lark_pattern import lark_pattern

logger = logging.getLogger("jackfield.server")
INPUT = "input"
SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LONGEST_BEGIN = 64
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt])')
_PARTIAL = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_HIGH = re.compile(r"\\u[dD][89abAB]")


def custom_function(tool: dict[str, Any], path: str) -> tuple[dict[str, Any], Any]:
    """Return a custom tool as a chat's function, and its arguments' schema if its `format` is
    stricter.

    Raises InvalidRequest with the field's path.
    """
    format = tool.get("format")
    kind = format.get("type") if isinstance(format, dict) else None
    if format is not None and kind not in ("text", "grammar"):
        raise InvalidRequest(
            f"{path}.format.type: must be text or grammar, got {shown(kind)}",
            param=f"{path}.format.type",
        )
    says, pattern = "The whole input of the tool, as text.", None
    if isinstance(format, dict) and kind == "grammar":
        syntax, definition = format.get("syntax"), format.get("definition")
        if syntax not in SYNTAXES:
            raise InvalidRequest(
                f"{path}.format.syntax: must be lark or regex, got {shown(syntax)}",
                param=f"{path}.format.syntax",
            )
        if not isinstance(definition, str) or not definition:
            raise InvalidRequest(
                f"{path}.format.definition: must be a non-empty text",
                param=f"{path}.format.definition",
            )
        says += f" It follows this {SYNTAXES[syntax]}:\n{definition}"
        pattern = definition if syntax == "regex" else _pattern_of(definition, path)
    function = {"name": tool["name"], "parameters": _parameters(description=says)}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return function, None if pattern is None else _parameters(pattern=f"^({pattern})$")


def _pattern_of(definition: str, path: str) -> str | None:
    try:
        return lark_pattern(definition)
    except ValueError as error:
        logger.warning("%s.format: is not enforced: %s", path, error)
        return None


def _parameters(**keywords: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {INPUT: {"type": "string", **keywords}},
        "required": [INPUT],
        "additionalProperties": False,
    }


class InputReader:
    """Reads a custom tool's input incrementally from its JSON arguments."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        """The arguments until the input begins."""
        self._start = ""
        """Their first characters."""
        self._has_begun = self._ended = False
        """Whether the input has begun, and its closing quote was read."""
        self._rest = ""
        """Beginning of an escape."""

    def feed(self, fragment: str) -> str:
        """Return the input text that a fragment adds."""
        if self._has_begun:
            return self._unescaped(fragment)
        self._arguments.append(fragment)
        if len(self._start) >= _LONGEST_BEGIN:  # Other arguments: read at the end, as a whole.
            return ""
        self._start += fragment
        match = _BEGIN.match(self._start)
        if match is None:
            return ""
        self._has_begun, self._arguments = True, []
        return self._unescaped(self._start[match.end() :])

    def finish(self, *, complete: bool) -> str:
        """Return the remaining text: everything, if complete arguments are not the expected
        object.
        """
        arguments, self._arguments = "".join(self._arguments), []
        return _input_of(arguments) if complete and not self._has_begun else ""

    def _unescaped(self, fragment: str) -> str:
        if self._ended:
            return ""
        text, self._rest = self._rest + fragment, ""
        parts: list[str] = []
        place = 0
        while place < len(text):
            if (plain := _PLAIN.match(text, place)) is not None:
                parts.append(plain[0])
                place = plain.end()
                continue
            if text[place] == '"':
                self._ended = True
                break
            escape = _ESCAPE.match(text, place)
            if escape is not None and _HIGH.match(text, place):
                low = _ESCAPE.match(text, escape.end())
                end = escape.end()
                if low is None and (end == len(text) or _PARTIAL.match(text, end)):
                    break  # The other half of the character may follow.
                if low is not None and low[0].startswith("\\u"):
                    parts.append(_character(escape[0] + low[0]))
                    place = low.end()
                    continue
            if escape is None:
                if _PARTIAL.match(text, place):
                    break
                parts.append(text[place])  # No JSON: a backslash that stands for itself.
                place += 1
                continue
            parts.append(_character(escape[0]))
            place = escape.end()
        self._rest = "" if self._ended else text[place:]
        return "".join(parts)


def _character(escapes: str) -> str:
    text: str = json.loads(f'"{escapes}"')
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _input_of(arguments: str) -> str:
    """Return the input in any arguments: `input`, the only argument, or everything."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, dict) and (INPUT in value or len(value) == 1):
        value = value.get(INPUT, next(iter(value.values())))
    return value if isinstance(value, str) else arguments

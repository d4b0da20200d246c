"""Model families whose blocks of calls are read as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias
from xml.sax.saxutils import unescape

from ..parsing.block_calls import (
    BlockCallsParser,
    attribute,
    elements,
    object_of,
    objects,
    value_of,
)
from ..parsing.element_tree import arguments_of

_STRING = frozenset({"string"})
_NULL = frozenset({"null"})
_Call: TypeAlias = tuple[str, str]
"""A name, and arguments as JSON."""


class Spark25ToolParser(BlockCallsParser):
    """`<tool_call>f`, then `<arg_key>a</arg_key><arg_value>…</arg_value>`, and `</tool_call>`.
    Only tools of the request are called; the text `null` is null for every type.
    """

    open, close = ("<tool_call>",), "</tool_call>"
    markers = (*open, close, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def calls(self, block: str) -> list[tuple[str, str]] | None:
        name, begin, rest = block.partition("<arg_key>")
        name = name.strip()
        if not name or not self.known(name):
            return None
        tags = {"<arg_key>": "</arg_key>", "<arg_value>": "</arg_value>"}
        arguments: dict[str, str] = {}
        key = None
        for element in elements(begin + rest, tags):
            if element is None or (element[0] == "<arg_key>") != (key is None):
                return None
            text = element[1]
            if key is None:
                key = text.strip()
                continue
            types = self.types(name, key) or _STRING
            arguments[key] = "null" if text.strip() == "null" else value_of(text, types)
            key = None
        return [(name, objects(arguments))] if key is None else None


class K2HorizonToolParser(BlockCallsParser):
    """`<ifm|tool_calls>`, then calls `<ifm|tool_call>f<ifm|arg_key>a</ifm|arg_key><ifm|arg_value>…
    </ifm|arg_value></ifm|tool_call>`, and `</ifm|tool_calls>`; with `<ifm|arg_type>` between key
    and value, or as JSON. One wrong call makes all of them content.
    """

    open, close = ("<ifm|tool_calls>",), "</ifm|tool_calls>"
    markers = (*open, close, *(
        f"<{end}ifm|{name}>"
        for name in ("tool_call", "arg_key", "arg_type", "arg_value") for end in ("", "/")
    ))  # fmt: skip
    kinds = {
        "boolean": "boolean", "integer": "integer", "number": "number", "null": "null",
        "array": "array", "object": "object", "string": "string",
    }  # fmt: skip

    def calls(self, block: str) -> list[tuple[str, str]] | None:
        calls = []
        for element in elements(block, {"<ifm|tool_call>": "</ifm|tool_call>"}):
            call = self._call(element[1].strip()) if element is not None else None
            if call is None:
                return None
            calls.append(call)
        return calls

    def _call(self, text: str) -> tuple[str, str] | None:
        if text.startswith("{"):
            return _json_call(self, text, ("arguments",))
        name, begin, rest = text.partition("<ifm|arg_key>")
        name = name.strip()
        if not name or "<" in name or not self.known(name):
            return None
        tags = ("arg_key", "arg_type", "arg_value")
        parts = list(elements(begin + rest, {f"<ifm|{tag}>": f"</ifm|{tag}>" for tag in tags}))
        arguments: dict[str, str] = {}
        typed = any(part is not None and part[0] == "<ifm|arg_type>" for part in parts)
        order = tags if typed else ("arg_key", "arg_value")
        while parts:
            argument, parts = parts[: len(order)], parts[len(order) :]
            if [part and part[0] for part in argument] != [f"<ifm|{tag}>" for tag in order]:
                return None
            key, *kind, value = (part[1] for part in argument if part is not None)
            if key in arguments:
                return None
            arguments[key] = value_of(value, self._types(name, key, "".join(kind)))
        return name, objects(arguments)

    def _types(self, name: str, key: str, kind: str) -> frozenset[str]:
        """Return an argument's types: the schema's, narrowed by the written one."""
        own = self.kinds.get(kind.partition("[")[0].strip())
        types = self.types(name, key)
        if not types:
            return frozenset({own or "string"})
        return frozenset({own}) if own in types else types


def _json_call(parser: BlockCallsParser, text: str, keys: tuple[str, ...]) -> _Call | None:
    """Return the call of an object with arguments under one of these keys."""
    call = object_of(text)
    if call is None:
        return None
    arguments = object_of(next((call[key] for key in keys if key in call), "{}"))
    name = json.loads(call.get("name", "null"))
    if not isinstance(name, str) or not name or not parser.known(name) or arguments is None:
        return None
    return name, objects(arguments)


class DotsToolParser(BlockCallsParser):
    """`<dots_function_call>`, then `<invoke name="f"><parameter name="a">…</parameter></invoke>`
    or `{"name": "f", "arguments": {…}}`, and `</dots_function_call>`. Text after calls is dropped.
    """

    open, close = ("<dots_function_call>",), "</dots_function_call>"
    markers = (*open, close)
    ends_turn = reads_unfinished = True

    def calls(self, block: str) -> list[tuple[str, str]] | None:
        """Read the calls of a block, except to unknown tools."""
        if block.lstrip().startswith("{"):
            call = _json_call(self, block, ("arguments", "parameters"))
            return None if call is None else [call]
        calls = []
        for element in elements(block, {"<invoke name=": "</invoke>"}):
            header = attribute(element[1]) if element is not None else None
            if element is not None and header is not None and self.known(header[0]):
                name, begin = header
                calls.append((name, objects(self._arguments(name, element[1][begin:]))))
        return calls

    def _arguments(self, name: str, text: str) -> dict[str, str]:
        arguments = {}
        for element in elements(text, {"<parameter name=": "</parameter>"}):
            header = attribute(element[1]) if element is not None else None
            if element is None or header is None:
                break
            key, value = header[0], element[1][header[1] :].strip()
            types = (self.types(name, key) - _NULL) or _STRING
            if value == "null":
                arguments[key] = "null"
            elif types == {"boolean"} and value == "1":
                arguments[key] = "true"
            else:
                arguments[key] = value_of(value, types)
        return arguments


_CDATA = ("<![CDATA[", "]]>")
_PARAMETER = re.compile(r"\s*<param ?name=")
_VALUE = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>\s*</param>|(?!\s*<!\[CDATA\[)(.*?)</param>", re.S)
_WRAPPERS = ("properties", "arguments")


class MiniCpm5ToolParser(BlockCallsParser):
    """`<function name="f"><param name="a">…</param></function>`; a value may stand in CDATA, and
    the space in a tag may be lost. A call of an unknown tool, or without a required argument, is
    content.
    """

    open, close = ("<function name=", "<functionname="), "</function>"
    verbatim = _CDATA
    markers = ("<function", close, "<param", "</param>", "<arguments>", "</arguments>")

    def calls(self, block: str) -> list[tuple[str, str]] | None:
        header = attribute(block)
        if header is None or not self.known(header[0]):
            return None
        name, begin = header
        body = block[begin:].strip()
        if body.startswith("<arguments>") and body.endswith("</arguments>"):
            body = body.removeprefix("<arguments>").removesuffix("</arguments>")
        arguments: dict[str, str] = {}
        for parameter in _parameters(body):
            if parameter is None or parameter[0] in arguments:
                return None
            arguments[parameter[0]] = self._value(name, *parameter)
        return self._checked(name, arguments)

    def _value(self, name: str, key: str, text: str, verbatim: bool) -> str:
        types = self.types(name, key)
        if not verbatim:
            text = unescape(text.strip(), {"&quot;": '"', "&apos;": "'"})
        return value_of(text, types if types == _STRING else frozenset())

    def _checked(self, name: str, arguments: dict[str, str]) -> list[tuple[str, str]] | None:
        """Return the call without unknown arguments, if it fits the tool's schema."""
        schema = self.schemas.get(name)
        schema = schema if isinstance(schema, Mapping) else {}
        properties = schema.get("properties")
        if len(arguments) == 1 and (wrapper := next(iter(arguments))) in _WRAPPERS:
            if not (isinstance(properties, Mapping) and wrapper in properties):
                inner = object_of(arguments[wrapper])
                arguments = arguments if inner is None else inner
        if isinstance(properties, Mapping):
            arguments = {key: value for key, value in arguments.items() if key in properties}
        required = schema.get("required")
        if isinstance(required, list) and not set(map(str, required)) <= arguments.keys():
            return None
        return [(name, objects(arguments))]


def _parameters(text: str) -> Iterator[tuple[str, str, bool] | None]:
    """Yield each parameter's (key, text, whether in CDATA); None for anything else."""
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _PARAMETER.match(text, position)
        header = attribute(text, match.end()) if match else None
        value = _VALUE.match(text, header[1]) if header else None
        if header is None or value is None:
            yield None
            return
        verbatim, plain = value.groups()
        yield header[0], plain if verbatim is None else verbatim, verbatim is not None
        position = value.end()


_M3 = "]<]minimax[>["


class MiniMaxM3ToolParser(BlockCallsParser):
    """`]<]minimax[>[<tool_call>`, then `]<]minimax[>[<invoke name="f">` and an element for each
    argument, named after it, with elements inside for objects and lists; every tag has the prefix.
    Text after calls is dropped.
    """

    open, close = (f"{_M3}<tool_call>",), f"{_M3}</tool_call>"
    markers = (_M3, "<tool_call>", "</tool_call>")
    ends_turn = reads_unfinished = True

    def calls(self, block: str) -> list[tuple[str, str]] | None:
        calls: list[tuple[str, str]] = []
        tags = {f"{_M3}<invoke name=": f"{_M3}</invoke>"}
        for element in elements(block, tags):
            header = attribute(element[1]) if element is not None else None
            if element is None or header is None:
                break
            name, begin = header
            calls.append((name, arguments_of(element[1][begin:], _M3, self.schemas.get(name))))
        return calls

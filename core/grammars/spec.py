"""The canonical form of a request's grammar, and its bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ..config import StructuredOutputsConfig
from ..errors import InvalidRequest
from ..protocols.grammars import GrammarSpec
from ..sampling_params import STRUCTURED_KINDS, StructuredOutputsParams
from .schemas.json_schemas import adapted, log_unchecked
from .schemas.keywords import subschemas
from .schemas.quoting import GBNF_QUOTES, JSON_QUOTES, LARK_QUOTES, REGEX_QUOTES, split_quoted

_JOINED = frozenset(("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties"))
_WHOLE = frozenset(("additionalProperties", "patternProperties"))


def grammar_spec(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> GrammarSpec:
    """Return the canonical form, bounded, with adapted schemas.

    Raises InvalidRequest with the field's name.
    """
    name = field_of(params)
    try:
        spec = _canonical(params)
    except RecursionError:
        raise _too_deep(name, config) from None
    except ValueError as error:
        raise InvalidRequest(f"{name}: is not JSON as it should be: {error}", param=name) from None
    check_bounds(spec.text, name, config, kind=spec.kind)
    try:
        match spec.kind:
            case "json":
                schema = _adapted(json.loads(spec.text), strict=params.strict is True)
                return GrammarSpec("json", _text(closed(schema)))
            case "structural_tag":
                tag = _adapted_tag(json.loads(spec.text), strict=params.strict is True)
                return GrammarSpec("structural_tag", _text(tag))
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}", param=name) from None
    return spec


def check_bounds(
    text: str, name: str, config: StructuredOutputsConfig, *, kind: str = "json"
) -> None:
    """Raise InvalidRequest about field `name` for a too large or too nested text.

    kind: a `GrammarSpec`'s. Precedes any parsing, to protect the event loop.
    """
    size = len(text.encode("utf-8", "replace"))
    if size > config.max_grammar_bytes:
        raise InvalidRequest(
            f"{name}: {size} bytes, at most {config.max_grammar_bytes} allowed (max_grammar_bytes)",
            param=name,
        )
    if _depth(text, kind) > config.max_grammar_depth:
        raise _too_deep(name, config)


def field_of(params: StructuredOutputsParams) -> str:
    kinds = (kind for kind in STRUCTURED_KINDS if getattr(params, kind) is not None)
    return params.field or f"structured_outputs.{next(kinds)}"


def _canonical(params: StructuredOutputsParams) -> GrammarSpec:
    if params.regex is not None:
        return GrammarSpec("regex", params.regex)
    if params.grammar is not None:
        return GrammarSpec("grammar", params.grammar)
    if params.choice is not None:
        return GrammarSpec("choice", _text(list(params.choice)))
    if params.structural_tag is not None:
        tag = _decoded(params.structural_tag)
        if not isinstance(tag, dict):
            raise ValueError("a structural tag is an object")
        return GrammarSpec("structural_tag", _text(tag))
    if params.json is not None:
        schema = _decoded(params.json)
        if not isinstance(schema, dict | bool):
            raise ValueError("a schema is an object")
        return GrammarSpec("json", _text(schema))
    return GrammarSpec("json_object")


def closed(schema: Any) -> Any:
    """Forbid unlisted properties in objects with `properties`, by default; return the schema.

    As in OpenAI's strict mode; backends then agree. Schemas joined from parts stay, as no value
    would fit all closed parts.
    """
    for part in subschemas(schema):
        joined = "properties" in part and not part.keys().isdisjoint(("anyOf", "oneOf", "$ref"))
        if joined or not part.keys().isdisjoint(_JOINED):
            return schema
    for part in subschemas(schema):
        if "properties" in part and part.keys().isdisjoint(_WHOLE):
            part["additionalProperties"] = False
    return schema


def _adapted(schema: Any, *, strict: bool) -> Any:
    schema, unchecked = adapted(schema, strict=strict)
    log_unchecked(unchecked)
    return schema


def _adapted_tag(tag: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    for schema in tag_schemas(tag):
        closed(_adapted(schema, strict=strict))
    return tag


def tag_schemas(tag: dict[str, Any]) -> Iterator[Any]:
    """Yield a structural tag's JSON schemas."""
    structures = tag.get("structures")
    for structure in structures if isinstance(structures, list) else ():
        if isinstance(structure, dict):
            yield structure.get("schema")
    for part in tag_formats(tag):
        if part.get("type") == "json_schema":
            yield part.get("json_schema")


def tag_formats(tag: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the formats of a `{"format": …}` tag, outermost first."""
    pending = [tag.get("format")]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending.extend(part)
        elif isinstance(part, dict):
            yield part
            pending.extend(part.get(key) for key in ("elements", "tags", "content"))


def begins_free(spec: GrammarSpec) -> bool:
    if spec.kind != "structural_tag":
        return False
    tag = json.loads(spec.text)
    if "format" not in tag:
        return not tag.get("at_least_one")
    pending = [tag["format"]]
    while pending:
        part = pending.pop()
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "any_text" or (kind == "triggered_tags" and not part.get("at_least_one")):
            return True
        if kind == "or" and isinstance(part.get("elements"), list):
            pending.extend(part["elements"])
    return False


def _decoded(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, str) else value


def _text(value: Any) -> str:
    """Return JSON with keys in order, as properties appear in outputs."""
    return msgspec.json.encode(value).decode()


def _too_deep(name: str, config: StructuredOutputsConfig) -> InvalidRequest:
    return InvalidRequest(
        f"{name}: nested deeper than {config.max_grammar_depth} (max_grammar_depth)", param=name
    )


def _depth(text: str, kind: str) -> int:
    """Return the depth of brackets, separately in quotes."""
    match kind:
        case "regex":
            return _nesting(split_quoted(text, REGEX_QUOTES)[0])
        case "grammar":
            quotes = GBNF_QUOTES if "::=" in text else LARK_QUOTES
            outside, inside = split_quoted(text, quotes, lines=True)
        case _:
            outside, inside = split_quoted(text, JSON_QUOTES)
    return max(map(_nesting, (outside, *inside)))


def _nesting(text: str) -> int:
    """Return the nesting depth; unclosed brackets persist."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[({]|[\])}]", text):
        if bracket in "[({":
            depth += 1
            deepest = max(deepest, depth)
        elif depth:
            depth -= 1
    return deepest

"""Constraints on outputs: response formats, and grammars of every kind."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from ....core.errors import InvalidRequest, shown
from ....core.sampling_params import (
    STRUCTURED_KINDS,
    StructuredOutputsParams,
    structured_outputs_from,
)

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""vLLM's older fields → kinds."""


def requested(body: Any) -> StructuredOutputsParams | None:
    """Return the constraint of `response_format`, `structured_outputs` or `guided_*`; several must
    be equal, as some clients send a field under both names.

    Raises InvalidRequest with the field's name.
    """
    constraints: dict[str, StructuredOutputsParams] = {}
    if (format := _from_format(body.response_format)) is not None:
        constraints["response_format"] = format
    if body.structured_outputs is not None:
        constraints["structured_outputs"] = structured_outputs_from(body.structured_outputs)
    for name, kind in GUIDED.items():
        if (value := getattr(body, name)) is not None:
            constraints[name] = made(name, kind, value)
    first = next(iter(constraints.values()), None)
    for name, params in constraints.items():
        if first is not None and _meaning(params) != _meaning(first):
            raise InvalidRequest(
                f"{next(iter(constraints))} and {name}: only one of them may be given, unless they "
                "say the same",
                param=name,
            )
    return first


def _meaning(params: StructuredOutputsParams) -> tuple[str, Any]:
    """Return the kind, and a comparable value."""
    kind = next(k for k in STRUCTURED_KINDS if getattr(params, k) is not None)
    value = getattr(params, kind)
    if kind in ("json", "structural_tag") and isinstance(value, str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            value = msgspec.json.decode(value)
    return kind, value


def _from_format(response_format: dict[str, Any] | None) -> StructuredOutputsParams | None:
    field = "response_format"
    if response_format is None:
        return None
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            return made(field, "json_object", True)
        case "json_schema":
            wrapped = response_format.get("json_schema")
            schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
            if wrapped is None or not isinstance(schema, dict | bool):
                raise InvalidRequest(
                    "response_format.json_schema: needs an object with schema",
                    param="response_format.json_schema",
                )
            return made(field, "json", schema, strict=_strict(wrapped))
        case "structural_tag":
            return made(field, "structural_tag", response_format)
        case other:
            raise InvalidRequest(
                "response_format.type: must be text, json_object, json_schema or structural_tag, "
                f"got {shown(other)}",
                param="response_format.type",
            )


def _strict(wrapped: dict[str, Any]) -> bool | None:
    strict = wrapped.get("strict")
    if not isinstance(strict, bool | None):
        param = "response_format.json_schema.strict"
        raise InvalidRequest(f"{param}: must be true or false", param=param)
    return strict


def made(
    field: str, kind: str, value: Any, *, strict: bool | None = None
) -> StructuredOutputsParams:
    """Return the parameters of one kind."""
    try:
        return StructuredOutputsParams(**{kind: value}, strict=strict, field=field)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error.message}", param=field) from None

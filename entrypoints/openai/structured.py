"""What a request's output must look like: response formats, and grammars of every kind."""

from __future__ import annotations

from typing import Any

from ...core.errors import InvalidRequest
from ...core.types import StructuredOutputsParams, structured_outputs_from

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""vLLM's older names → kinds."""


def requested(asked: Any) -> StructuredOutputsParams | None:
    """From `response_format`, `structured_outputs` or a `guided_*` field; at most one of them.

    Raises InvalidRequest with the field's name.
    """
    found: dict[str, StructuredOutputsParams] = {}
    if (format := _from_format(asked.response_format)) is not None:
        found["response_format"] = format
    if asked.structured_outputs is not None:
        found["structured_outputs"] = structured_outputs_from(asked.structured_outputs)
    for name, kind in GUIDED.items():
        if (value := getattr(asked, name)) is not None:
            found[name] = made(name, kind, value)
    if len(found) > 1:
        raise InvalidRequest(
            f"{' and '.join(found)}: only one of them may be given", param=list(found)[1]
        )
    return next(iter(found.values()), None)


def _from_format(given: dict[str, Any] | None) -> StructuredOutputsParams | None:
    field = "response_format"
    if given is None:
        return None
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return made(field, "json_object", True)
        case "json_schema":
            wrapped = given.get("json_schema")
            schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
            if not isinstance(schema, dict | bool):
                raise InvalidRequest(
                    "response_format.json_schema: needs an object with schema",
                    param="response_format.json_schema",
                )
            return made(field, "json", schema)
        case "structural_tag":
            return made(field, "structural_tag", given)
        case other:
            raise InvalidRequest(
                "response_format.type: must be text, json_object, json_schema or structural_tag, "
                f"got {other!r}",
                param="response_format.type",
            )


def made(field: str, kind: str, value: Any) -> StructuredOutputsParams:
    """Raises InvalidRequest with the field's name."""
    try:
        return StructuredOutputsParams(**{kind: value}, field=field)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error.message}", param=field) from None

"""docs/reference/fields.md: fields of requests beside those of OpenAI and vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
from markdown_table import table

from jackfield.entrypoints.openai.common import decoding, protocol
from jackfield.entrypoints.openai.pooling import protocol as pooling_protocol
from jackfield.entrypoints.openai.responses import protocol as responses_protocol

DOCS = Path(__file__).resolve().parent


def fields() -> str:
    """Request fields beside OpenAI's and vLLM's. Theirs are recorded in docs/fields.json."""
    known = json.loads((DOCS / "fields.json").read_text())
    parts = [
        "# Request fields, beside OpenAI's and vLLM's\n\n"
        "What becomes of each field that a program written for OpenAI or vLLM may send. "
        f"OpenAI: the fields of its Python package `openai` {known['openai']}; vLLM: those of its "
        "request classes as of 2026, `older` where it had the name before. What each means: "
        "[HTTP API](http-api.md).\n\n"
        + table(["here", ""], [[f"{name}", about] for name, about in OUTCOMES.items()])
    ]
    for route in known["routes"]:
        parts.append(f"\n## {route['title']}\n\n")
        whose = ["OpenAI", "vLLM"] if route["openai"] else ["vLLM"]
        parts.append(table(["field", *whose, "here", ""], _field_rows(route, whose)))
    return "".join(parts)


OUTCOMES = {
    "yes": "it has its effect; a value that cannot have it is refused by the field's name",
    "no effect": "taken and not used",
    "refused": "a request that asks for something with it gets a 400 that says why; null, false, "
    "empty text, lists and objects ask for nothing",
    "ignored": "not known here, as any other name",
}


def _field_rows(route: dict[str, Any], whose: list[str]) -> list[list[str]]:
    """A row for each field of a route, by what becomes of them."""
    places = (protocol, pooling_protocol, responses_protocol)
    (struct,) = {vars(place)[route["struct"]] for place in places if route["struct"] in vars(place)}
    own = {field.name for field in msgspec.structs.fields(struct)}
    refused = {name: why for name, why in decoding.UNSUPPORTED.items() if name not in own}
    refused |= getattr(struct, "REFUSED", {}) | getattr(struct, "UNSUPPORTED", {})
    theirs = {"OpenAI": route["openai"], "vLLM": route["vllm"]}
    rows = []
    for name in own.union(*theirs.values(), route["vllm_older"], route.get("sglang", ())):
        here = "yes" if name in own else "ignored"
        note = route["notes"].get(name, "")
        if name in refused:
            here, note = "refused", re.sub(r"(--[\w.-]+)", r"`\1`", refused[name])
        elif name in decoding.IGNORED and here == "ignored":
            note = "with a log line: " + re.sub(r"(--[\w.-]+)", r"`\1`", decoding.IGNORED[name])
        elif name in route["no_effect"]:
            here = "no effect"
        had = ["yes" if name in theirs[who] else "" for who in whose]
        if name in route["vllm_older"]:
            had[-1] = "older"
        rows.append([name if here == "ignored" else f"`{name}`", *had, here, note])
    return sorted(rows, key=lambda row: (list(OUTCOMES).index(row[-2]), row[0].strip("`")))

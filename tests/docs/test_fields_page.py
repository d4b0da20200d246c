"""docs/reference/openai-fields.md against the request classes and the `openai` package."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec
import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pages import ROOT

from jackfield.entrypoints.openai.protocol import UNSUPPORTED, ChatRequest, CompletionRequest

PAGE = (ROOT / "docs" / "reference" / "openai-fields.md").read_text()
KINDS: list[Any] = [
    ("Chat completions", ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
    ("Completions", CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
]


class Row(NamedTuple):
    """One field."""

    openai: str
    vllm: str
    here: str
    note: str


def table(title: str) -> dict[str, Row]:
    section = re.split(r"^## ", PAGE.partition(f"## {title}\n")[2], flags=re.M)[0]
    found = re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|$", section, re.M)
    return {name: Row(*(cell.strip() for cell in cells)) for name, *cells in found}


@pytest.mark.parametrize(("title", "kind", "theirs"), KINDS)
def test_the_table_says_what_the_server_does(title: str, kind: Any, theirs: Any) -> None:
    rows = table(title)
    fields = {field.name for field in msgspec.structs.fields(kind)}
    assert fields == {name for name, row in rows.items() if row.here != "refused"}
    for name, row in rows.items():
        assert row.here in ("yes", "taken, not used", "refused")
        assert row.openai in ("yes", "") and row.vllm in ("yes", "older", "")
        if row.here == "refused":
            assert row.note.replace("`", "") == UNSUPPORTED[name]


@pytest.mark.parametrize(("title", "kind", "theirs"), KINDS)
def test_every_field_of_openai_has_its_row(title: str, kind: Any, theirs: Any) -> None:
    version = ".".join(openai.__version__.split(".")[:2])
    if f"`openai` {version};" not in PAGE:
        pytest.skip(f"the page is about another version than {version}")
    rows = table(title)
    assert set(theirs.__annotations__) == {name for name, row in rows.items() if row.openai}


def test_every_refusal_is_in_a_table() -> None:
    refused = {
        name for title, *_ in KINDS for name, row in table(title).items() if row.here == "refused"
    }
    assert set(UNSUPPORTED) - set(ChatRequest.__struct_fields__) <= refused

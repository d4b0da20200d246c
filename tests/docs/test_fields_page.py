"""docs/reference/fields.md against the request classes and the `openai` package."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import openai
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pages import ROOT

from jackfield.core.errors import InvalidRequest
from jackfield.entrypoints.openai.common import decoding, protocol
from jackfield.entrypoints.openai.pooling import protocol as pooling_protocol
from jackfield.entrypoints.openai.responses import protocol as responses_protocol

PAGE = (ROOT / "docs/reference/fields.md").read_text()
ROW = re.compile(
    r"^\| `?(\w+)`? \|(?:[^|\n]*\|)*? (yes|no effect|refused|ignored) \|[^|\n]*\|$", re.M
)
PARTS = [part.partition("\n") for part in re.split(r"^## ", PAGE, flags=re.M)[1:]]
TABLES = {title: dict(ROW.findall(text)) for title, _, text in PARTS}
"""Title → field → what becomes of it."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
KINDS: list[Any] = [
    ("Chat completions", protocol.ChatRequest, CHAT),
    ("Completions", protocol.CompletionRequest, {"prompt": "Hello"}),
    ("Responses", responses_protocol.ResponsesRequest, {"input": "Hello"}),
    ("Embeddings", pooling_protocol.EmbeddingRequest, {"input": "Hello"}),
    ("Pooling", pooling_protocol.PoolingRequest, {"input": "Hello"}),
    ("Classification", pooling_protocol.ClassifyRequest, {"input": "Hello"}),
    ("Scores", pooling_protocol.ScoreRequest, {"text_1": "Hello", "text_2": "Hi"}),
    ("Reranking", pooling_protocol.RerankRequest, {"query": "Hello", "documents": ["Hi"]}),
]
OPENAI: dict[str, Any] = {
    "Chat completions": chat_create_params.CompletionCreateParamsStreaming,
    "Completions": completion_create_params.CompletionCreateParamsStreaming,
    "Responses": response_create_params.ResponseCreateParamsStreaming,
    "Embeddings": embedding_create_params.EmbeddingCreateParams,
}


def table(title: str) -> dict[str, str]:
    (rows_of_table,) = (rows for name, rows in TABLES.items() if name.startswith(f"{title}:"))
    return rows_of_table


def ask(kind: Any, body: dict[str, Any]) -> None:
    """As the routes do. Raises InvalidRequest."""
    request = decoding.decode(json.dumps(body).encode(), kind)
    if isinstance(request, responses_protocol.ResponsesRequest):
        request.check()
    if isinstance(request, pooling_protocol.RerankRequest):
        request.texts()


@pytest.mark.parametrize(("title", "kind", "least"), KINDS)
def test_the_table_says_what_becomes_of_a_field(
    title: str, kind: Any, least: dict[str, Any]
) -> None:
    rows = table(title)
    own = {field.name for field in msgspec.structs.fields(kind)}
    assert own <= rows.keys()
    assert {name for name, here in rows.items() if here in ("yes", "no effect")} <= own
    for name, here in rows.items():
        if here == "refused":
            names = set()
            for value in ("x", 1, ["x"], {"x": 1}):
                with pytest.raises(InvalidRequest) as refused:
                    ask(kind, {**least, name: value})
                names.add(str(refused.value))
            assert any("is not supported" in text for text in names), names
        elif here == "ignored":
            ask(kind, {**least, name: "x"})


@pytest.mark.parametrize("title", OPENAI)
def test_every_field_of_openai_has_its_row(title: str) -> None:
    version = ".".join(openai.__version__.split(".")[:2])
    if f"`openai` {version};" not in PAGE:
        pytest.skip(f"the page is about another version than {version}")
    text = next(part for part in re.split(r"^## ", PAGE, flags=re.M) if part.startswith(title))
    marked = set(re.findall(r"^\| `?(\w+)`? \| yes \| \w* ?\|", text, re.M))
    assert set(OPENAI[title].__annotations__) == marked


def test_every_refusal_is_in_a_table() -> None:
    refused = {name for rows in TABLES.values() for name, here in rows.items() if here == "refused"}
    kinds = (protocol.ChatRequest, protocol.CompletionRequest)
    served = {name for kind in kinds for name in kind.__struct_fields__}
    assert set(decoding.UNSUPPORTED) - served <= refused

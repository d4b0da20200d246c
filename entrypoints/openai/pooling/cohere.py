"""POST /v2/embed: embeddings as Cohere's clients ask for them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
from aiohttp import web

from ....core.engine.async_engine import AsyncEngine
from ....core.errors import InvalidRequest
from ....core.pooling_params import PoolingParams
from ...http.context import ENGINE, new_id, reply
from ...http.large_responses import off_loop
from ...http.model_names import model_name
from ...http.routing import route
from ..common.openapi import documented
from ..common.renamed_fields import rename_field
from ..common.request_body import decode_body
from .protocol import PoolingFields, check_count
from .routes import check_task, encoded, numbers

PROMPT_NAMES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}
"""`input_type` → names of the checkpoint's prompts for it; those of others have its own name."""
EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class CohereContent(msgspec.Struct):
    type: Literal["text"]
    text: str


class CohereInput(msgspec.Struct):
    """An input of several parts, which are read as one text."""

    content: list[CohereContent]


class CohereEmbedRequest(PoolingFields, kw_only=True):
    """POST /v2/embed"""

    UNSUPPORTED: ClassVar = {
        **PoolingFields.UNSUPPORTED,
        "images": "see messages of /v1/embeddings, which may have pictures",
    }

    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    """In place of texts."""
    input_type: str | None = None
    """What the texts are: the checkpoint's prompt of that name (search_query, search_document,
    classification, clustering, …) comes before each, if it has one."""
    embedding_types: list[EmbeddingType] | None = None
    """Default: float. binary and ubinary: a bit for each number, eight in an integer."""
    output_dimension: int | None = None
    max_tokens: int | None = None
    """Tokens of a text that are read."""
    truncate: Literal["NONE", "START", "END"] = "END"
    """Whether what is too long is refused (NONE) or cut off at its end."""

    def params(self) -> PoolingParams:
        if self.truncate == "START":
            raise InvalidRequest(
                'truncate: texts are cut off at their end ("END") or refused ("NONE")',
                param="truncate",
            )
        most = self.max_tokens
        if most is not None and (not 1 <= most < 1 << 31 or self.truncate == "NONE"):
            raise InvalidRequest(
                "max_tokens: must be between 1 and 2147483647, and has no meaning with truncate "
                '"NONE"',
                param="max_tokens",
            )
        cut = None if self.truncate == "NONE" else (self.max_tokens or -1)
        return PoolingParams(
            task="embed", dimensions=self.output_dimension, truncate_prompt_tokens=cut
        )

    def given(self) -> tuple[str, list[str]]:
        """Return the field with the texts, and these. Raises InvalidRequest."""
        if (self.texts is None) == (self.inputs is None):
            raise InvalidRequest("texts: give either texts or inputs", param="texts")
        if self.inputs is None:
            name, texts = "texts", self.texts or []
        else:
            name = "inputs"
            texts = ["\n".join(part.text for part in each.content) for each in self.inputs]
        check_count(name, len(texts))
        return name, texts


class CohereEmbeddings(msgspec.Struct, omit_defaults=True):
    floats: list[list[float]] | None = msgspec.field(default=None, name="float")
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereEmbedResponse(msgspec.Struct):
    """Embeddings by type, in the order of the texts."""

    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"]


@route("POST /v2/embed", inference=True)
@documented("vectors and scores", request=CohereEmbedRequest, response=CohereEmbedResponse)
async def cohere_embed(request: web.Request) -> web.Response:
    """POST /v2/embed: a vector for each text, as Cohere's clients ask for it."""
    body = await decode_body(request, CohereEmbedRequest)
    engine = request.app[ENGINE]
    model_name(engine, body.model)
    check_task(engine, "/v2/embed", "embed")
    field, texts = body.given()
    before = _prompt(engine, body.input_type)
    name = new_id("embd", body.request_id)
    try:
        outputs = await encoded(engine, [before + text for text in texts], body, name, field=field)
    except InvalidRequest as error:
        raise rename_field(error, {"dimensions": "output_dimension"}) from None
    vectors = [output.outputs.data for output in outputs]
    kinds: list[EmbeddingType] = list(dict.fromkeys(body.embedding_types or ["float"]))
    size = len(kinds) * sum(vector.size for vector in vectors)
    embeddings = await off_loop(
        size, lambda: {kind: [_as(kind, vector) for vector in vectors] for kind in kinds}
    )
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return reply(
        {
            "id": name,
            "embeddings": embeddings,
            "texts": texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}},
            "response_type": "embeddings_by_type",
        }
    )


def _prompt(engine: AsyncEngine, input_type: str | None) -> str:
    """Return what comes before each text of a type, "" unless the checkpoint says so."""
    pooling = engine.model_config.pooling
    if input_type is None or pooling is None:
        return ""
    names = PROMPT_NAMES.get(input_type, (input_type,))
    return next((pooling.prompts[name] for name in names if name in pooling.prompts), "")


def _as(kind: EmbeddingType, vector: np.ndarray) -> Any:
    if kind in ("float", "base64"):
        return numbers(vector, kind)
    bits = np.packbits(vector > 0)
    return (bits.astype(np.int16) - 128 if kind == "binary" else bits).tolist()

"""Requests of the routes for vectors, labels and scores, typed."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ....core.engine.async_engine import AsyncEngine
from ....core.errors import InvalidRequest
from ....core.pooling_params import PoolingParams, PoolingTask
from ....core.sampling_params import all_ints
from ...http.auth.origin import Origin
from ...http.context import check_priority
from ...scoring import Scored, ScoredText, scored_texts

MAX_INPUTS = 2048
"""Limit of texts in one request, as in OpenAI's API."""


class PoolingFields(msgspec.Struct, kw_only=True, dict=True):
    """Fields that all of them share. Names: OpenAI's, then vLLM's."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["right"] | None = None
    padding: Literal["do_not_pad"] | None = None
    add_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None

    origin: ClassVar[Origin] = Origin()

    UNSUPPORTED: ClassVar = {
        "instruction": "write it into the texts, in the form that the model was trained with",
        "late_chunking_params": "each text is pooled by itself",
    }

    def options(self, engine: AsyncEngine, name: str) -> dict[str, Any]:
        """Return the engine's options. Raises InvalidRequest."""
        check_priority(engine, self.priority)
        return {
            **self.origin.engine_options(name, self.priority, self.cache_salt),
            "add_special_tokens": self.add_special_tokens,
        }


class InputFields(PoolingFields, kw_only=True):
    """Fields of requests whose texts stand alone."""

    input: str | list[Any] | None = None
    """Text, token ids, or a list of either."""
    messages: list[dict[str, Any]] | None = None
    """A conversation in place of input, through the model's chat template."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(InputFields, kw_only=True):
    """POST /v1/embeddings"""

    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "little"
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    """vLLM's newer name of normalize."""

    def params(self) -> PoolingParams:
        return PoolingParams(
            task="embed",
            normalize=_either(self.normalize, self.use_activation),
            dimensions=self.dimensions,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """POST /pooling"""

    task: PoolingTask | None = None
    activation: bool | None = None

    def params(self) -> PoolingParams:
        return PoolingParams(
            task=self.task,
            normalize=self.normalize,
            dimensions=self.dimensions,
            activation=_either(self.activation, self.use_activation),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class ClassifyRequest(InputFields, kw_only=True):
    """POST /classify"""

    activation: bool | None = None
    use_activation: bool | None = None

    def params(self) -> PoolingParams:
        return PoolingParams(
            task="classify",
            activation=_either(self.activation, self.use_activation),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class PairFields(PoolingFields, kw_only=True):
    """Fields of requests whose texts are compared."""

    UNSUPPORTED: ClassVar = {
        name: why for name, why in PoolingFields.UNSUPPORTED.items() if name != "instruction"
    }

    activation: bool | None = None
    use_activation: bool | None = None
    instruction: str | None = None
    """What makes a document match, for a chat template that joins texts and reads it."""
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    """Tokens of a text that are read; what follows them is cut off."""

    def params(self) -> PoolingParams:
        return PoolingParams(
            activation=_either(self.activation, self.use_activation),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )

    def template_kwargs(self) -> dict[str, Any]:
        """Return the arguments of the chat template that joins the texts."""
        instructions = {} if self.instruction is None else {"instruction": self.instruction}
        return {**(self.chat_template_kwargs or {}), **instructions}

    def limits(self) -> tuple[int | None, int | None]:
        """Return the token limits of a query and of a document. Raises InvalidRequest."""
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            if (limit := getattr(self, name)) is not None and limit < 1:
                raise InvalidRequest(f"{name}: must be at least 1, got {limit}", param=name)
        return self.max_tokens_per_query, self.max_tokens_per_doc


class ScoreRequest(PairFields, kw_only=True):
    """POST /score: one text with one, one with many, or pairs of two lists."""

    text_1: Scored | None = None
    text_2: Scored | None = None
    queries: Scored | None = None
    """vLLM's other name of text_1."""
    documents: Scored | None = None
    items: Scored | None = None
    data_1: Scored | None = None
    data_2: Scored | None = None

    NAMES: ClassVar = (
        ("text_1", "queries", "data_1"),
        ("text_2", "documents", "items", "data_2"),
    )

    def names(self) -> tuple[str, str]:
        """Return the names of both texts. Raises InvalidRequest for missing or duplicate ones."""
        fields: list[str] = []
        for names in self.NAMES:
            set_names = [name for name in names if getattr(self, name) is not None]
            if len(set_names) > 1:
                first, second, *_ = set_names
                raise InvalidRequest(
                    f"{second}: means the same as {first}; give one of them", param=second
                )
            if not set_names:
                other = fields[0] if fields else "text_2"
                name = {"queries": "documents", "data_1": "data_2"}.get(other, names[0])
                raise InvalidRequest(f"{name}: is missing", param=name)
            fields += set_names
        return fields[0], fields[1]

    def pairs(self) -> list[tuple[ScoredText, ScoredText]]:
        names = self.names()
        first, second = (scored_texts(getattr(self, name), name) for name in names)
        for name, texts in zip(names, (first, second), strict=True):
            check_count(name, len(texts))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequest(
                f"{names[1]}: {len(second)} texts for {len(first)} in {names[0]}; give as many, or "
                f"one in {names[0]}",
                param=names[1],
            )
        return list(zip(first, second, strict=True))


class RerankRequest(PairFields, kw_only=True):
    """POST /rerank, in the form that Cohere and Jina share."""

    UNSUPPORTED: ClassVar = {
        **PairFields.UNSUPPORTED,
        "max_chunks_per_doc": "a document is read as a whole; see max_tokens_per_doc",
        "rank_fields": "a document is its text",
    }

    query: str | dict[str, Any]
    documents: list[str | dict[str, Any]] | dict[str, Any]
    """Texts, or objects with a `text` or the `content` of a message; or one with `content` alone,
    of which each part is a document."""
    top_n: int | None = None
    return_documents: bool = True

    def texts(self) -> list[ScoredText]:
        if self.top_n is not None and self.top_n < 0:
            raise InvalidRequest(f"top_n: must be at least 0, got {self.top_n}", param="top_n")
        texts = scored_texts(self.documents, "documents")
        check_count("documents", len(texts))
        return texts

    def query_text(self) -> ScoredText:
        [text] = scored_texts([self.query], "query")
        return text


def inputs(value: str | list[Any] | None) -> list[str | list[int]]:
    if value is None or value == [] or value == "":
        raise InvalidRequest("input: must not be empty", param="input")
    if isinstance(value, str) or _is_token_ids(value):
        return [value]
    check_count("input", len(value))
    if not all(isinstance(item, str) or _is_token_ids(item) for item in value):
        raise InvalidRequest(
            "input: must be text, a list of token ids, or a list of such", param="input"
        )
    return value


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all_ints(value)


def check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequest(f"{name}: needs 1 to {MAX_INPUTS} texts, got {count}", param=name)


def _either(first: bool | None, second: bool | None) -> bool | None:
    return second if first is None else first

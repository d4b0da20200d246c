"""Requests of the routes for vectors, labels and scores, typed."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ....core.errors import InvalidRequest
from ....core.pooling_params import PoolingParams, PoolingTask
from ....core.sampling_params import all_ints
from ...http.auth.origin import Origin

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
    """As in SamplingRequest."""

    def options(self, name: str) -> dict[str, Any]:
        """Return the arguments for `AsyncEngine.encode`."""
        return {
            **self.origin.engine_options(name, self.priority, self.cache_salt),
            "add_special_tokens": self.add_special_tokens,
        }


class EmbeddingRequest(PoolingFields, kw_only=True):
    """POST /v1/embeddings"""

    input: str | list[Any] | None = None
    """Text, token ids, or a list of either."""
    messages: list[dict[str, Any]] | None = None
    """A conversation in place of input, through the model's chat template."""
    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "little"
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    """vLLM's newer name for normalize."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def params(self) -> PoolingParams:
        """Return the pooling parameters. Raises InvalidRequest with the field's name."""
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


class ClassifyRequest(PoolingFields, kw_only=True):
    """POST /classify"""

    input: str | list[Any] | None = None
    activation: bool | None = None
    use_activation: bool | None = None

    def params(self) -> PoolingParams:
        return PoolingParams(
            task="classify",
            activation=_either(self.activation, self.use_activation),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class ScoreRequest(PoolingFields, kw_only=True):
    """POST /score: one text with one, one with many, or pairs of two lists."""

    text_1: str | list[str]
    text_2: str | list[str]
    activation: bool | None = None
    use_activation: bool | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of texts. Raises InvalidRequest with the field's name."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        for name, texts in (("text_1", first), ("text_2", second)):
            _check_count(name, len(texts))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequest(
                f"text_2: {len(second)} texts for {len(first)} in text_1; give as many, or one "
                "text_1",
                param="text_2",
            )
        return list(zip(first, second, strict=True))

    def params(self) -> PoolingParams:
        return PoolingParams(
            activation=_either(self.activation, self.use_activation),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class RerankRequest(PoolingFields, kw_only=True):
    """POST /rerank, in the form that Cohere and Jina share."""

    REFUSED: ClassVar = dict.fromkeys(
        ("max_tokens_per_doc", "max_chunks_per_doc", "rank_fields"),
        "truncate_prompt_tokens cuts query and document together",
    )
    """Their fields for unsupported features → the text of the error."""

    query: str
    documents: list[str | dict[str, Any]]
    """Texts, or objects with a `text`."""
    top_n: int | None = None
    activation: bool | None = None
    use_activation: bool | None = None
    return_documents: bool = True
    max_tokens_per_doc: int | None = None
    max_chunks_per_doc: int | None = None
    rank_fields: list[str] | None = None

    def texts(self) -> list[str]:
        """Return the documents' texts. Raises InvalidRequest with the field's name."""
        for name, why in self.REFUSED.items():
            if getattr(self, name):
                raise InvalidRequest(f"{name}: is not supported; {why}", param=name)
        if self.top_n is not None and self.top_n < 0:
            raise InvalidRequest(f"top_n: must be at least 0, got {self.top_n}", param="top_n")
        _check_count("documents", len(self.documents))
        texts = []
        for number, document in enumerate(self.documents):
            text = document if isinstance(document, str) else document.get("text")
            if not isinstance(text, str):
                raise InvalidRequest(
                    f"documents: number {number} is neither text nor an object with a text",
                    param="documents",
                )
            texts.append(text)
        return texts

    def params(self) -> PoolingParams:
        return PoolingParams(
            activation=_either(self.activation, self.use_activation),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


def inputs(value: str | list[Any] | None) -> list[str | list[int]]:
    """Return the items of a field named input as a list. Raises InvalidRequest."""
    if value is None or value == [] or value == "":
        raise InvalidRequest("input: must not be empty", param="input")
    if isinstance(value, str) or _is_token_ids(value):
        return [value]
    _check_count("input", len(value))
    if not all(isinstance(item, str) or _is_token_ids(item) for item in value):
        raise InvalidRequest(
            "input: must be text, a list of token ids, or a list of such", param="input"
        )
    return value


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all_ints(value)


def _check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequest(f"{name}: needs 1 to {MAX_INPUTS} texts, got {count}", param=name)


def _either(first: bool | None, second: bool | None) -> bool | None:
    return second if first is None else first

"""Scores text pairs by a cross-encoder, by two vectors' cosine, or by the vectors of tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from ..core.engine.async_engine import AsyncEngine
from ..core.engine.pooling import PoolingPrompt
from ..core.errors import InvalidRequest
from ..core.inputs import ChatPrompt
from ..core.outputs import PoolingRequestOutput
from ..core.pooling_params import PoolingOutput, PoolingParams

STARTED_AT_ONCE = 16
"""Prompts tokenized per turn of the event loop."""
ScoredText: TypeAlias = str | tuple[int, ...] | list[dict[str, Any]]
"""A text, its token ids (cross-encoders take none), or parts of a message, such as pictures."""

Scored: TypeAlias = str | dict[str, Any] | list[str | dict[str, Any]]
"""A text, a list of texts and of {"content": parts of a message}, or such an object alone, of which
each part stands for itself."""


class PartOfText(dict[str, Any]):
    """A part of a text that is scored, whose place in the request errors name."""

    field: str


def scored_texts(value: Scored, name: str) -> list[ScoredText]:
    """Return the texts of a field. Raises InvalidRequest."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [[part] for part in _parts(value, name)]
    texts: list[ScoredText] = []
    for number, each in enumerate(value):
        if isinstance(each, str):
            texts.append(each)
        elif isinstance(each.get("text"), str):
            texts.append(each["text"])
        else:
            texts.append(_parts(each, name if name == "query" else f"{name}[{number}]"))
    return texts


def _parts(value: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """Return the parts in `content`. Raises InvalidRequest."""
    content = value.get("content")
    if not isinstance(content, list) or not content:
        raise InvalidRequest(
            f"{path}: is neither text nor an object with a text or the content of a message",
            param=path.partition("[")[0],
        )
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        field = f"{path}.content[{number}]"
        if not isinstance(part, dict):
            raise InvalidRequest(f"{field}: must be an object with a type", param=field)
        named = PartOfText(part)
        named.field = field
        parts.append(named)
    return parts


async def encode_all(
    engine: AsyncEngine,
    prompts: Sequence[PoolingPrompt],
    params: PoolingParams | None = None,
    *,
    max_values: int | None = None,
    fields: Sequence[str] | None = None,
    **options: Any,
) -> list[PoolingRequestOutput]:
    """Encode prompts concurrently; the first error aborts the others.

    `options`: of `AsyncEngine.encode`, with `request_id` as a prefix. max_values: most numbers in
    the outputs, else InvalidRequest. fields: each prompt's name in errors.
    """
    num_values = 0
    name = options.pop("request_id", None) or "pooled"
    unique = uuid.uuid4().hex  # So that no caller's name for another request is one of these.

    async def encode(prompt: PoolingPrompt, number: int) -> PoolingRequestOutput:
        request_id = f"{name}-{number}-{unique}"
        try:
            output = await engine.encode(prompt, params, request_id=request_id, **options)
        except InvalidRequest as error:
            if fields is None:
                raise
            raise with_field(error, fields[number]) from None
        nonlocal num_values
        num_values += output.outputs.data.size
        if max_values is not None and num_values > max_values:
            raise InvalidRequest(
                f"prompt: the vectors of all {len(prompts)} have more than {max_values} numbers; "
                "send fewer or shorter ones at once",
                param="prompt",
            )
        return output

    tasks: list[asyncio.Task[PoolingRequestOutput]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for number, prompt in enumerate(prompts):
                tasks.append(group.create_task(encode(prompt, number)))
                if number % STARTED_AT_ONCE == STARTED_AT_ONCE - 1:
                    await asyncio.sleep(0)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def with_field(error: InvalidRequest, field: str) -> InvalidRequest:
    """Return an error, under the field's name if it is about a prompt or its messages."""
    param = error.param or ""
    if param.partition("[")[0] not in {"prompt", "messages"} - {field}:
        return error
    return type(error)(error.message.replace(f"{param}:", f"{field}:", 1), param=field)


async def score_all(
    engine: AsyncEngine,
    pairs: Sequence[tuple[ScoredText, ScoredText]],
    params: PoolingParams | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    fields: tuple[str, str] | None = None,
    **options: Any,
) -> list[PoolingRequestOutput]:
    """Score pairs of texts: one output per pair, with `outputs.score` and both texts' tokens.

    fields: names of both texts in errors, where one of them alone is at fault.

    A chat template that reads the roles `query` and `document` joins a cross-encoder's pairs, with
    template_kwargs. Raises InvalidRequest without a scoring model.
    """
    pooling = engine.model_config.pooling
    if pooling is None or not pooling.scores:
        does = ", ".join(engine.supported_tasks)
        why = f"; its classifier has {len(pooling.labels)} labels" if pooling is not None else ""
        raise InvalidRequest(f"score: this model gives no scores ({does}{why})", param="model")
    params = params or PoolingParams()
    is_joined = not pooling.compares and engine.template_joins_pairs
    if template_kwargs and not is_joined:
        why = (
            "each text is embedded by itself: write it into the texts"
            if pooling.compares
            else "no chat template joins the texts; start the engine with one (chat_template) that "
            "reads messages of the roles query and document"
        )
        raise _refused(next(iter(template_kwargs)), why)
    if pooling.compares:
        params = msgspec.structs.replace(params, task=pooling.tasks[0], normalize=True)
        return await _by_vectors(engine, pairs, params, fields, options)
    prompts: list[PoolingPrompt] = []
    for first, second in pairs:
        if isinstance(first, tuple) or isinstance(second, tuple):
            raise InvalidRequest("score: a cross-encoder takes two texts, not token ids")
        if is_joined:
            prompts.append(_joined(engine, first, second, params, template_kwargs or {}))
        elif isinstance(first, str) and isinstance(second, str):
            prompts.append({"text": first, "text_pair": second})
        else:
            raise InvalidRequest(
                "score: no chat template joins pictures with texts; start the engine with one "
                "(chat_template) that reads messages of the roles query and document"
            )
    return await encode_all(
        engine, prompts, msgspec.structs.replace(params, task="score"), **options
    )


def _joined(
    engine: AsyncEngine,
    query: str | list[dict[str, Any]],
    document: str | list[dict[str, Any]],
    params: PoolingParams,
    template_kwargs: Mapping[str, Any],
) -> ChatPrompt:
    """Return a pair as a prompt, by the chat template."""
    if params.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: it would cut what the chat template writes last; see "
            "max_tokens_per_query and max_tokens_per_doc",
            param="truncate_prompt_tokens",
        )
    if unread := template_kwargs.keys() - engine.chat_template_variables:
        raise _refused(min(unread), "this model's chat template does not read it")
    messages: list[dict[str, Any]] = [
        {"role": "query", "content": query}, {"role": "document", "content": document},
    ]  # fmt: skip
    return {"messages": messages, "options": {"chat_template_kwargs": template_kwargs}}


def _refused(argument: str, why: str) -> InvalidRequest:
    """Return the refusal of an argument of the chat template; `instruction` has its own field."""
    field = "instruction" if argument == "instruction" else "chat_template_kwargs"
    name = field if field == argument else f"{field}.{argument}"
    return InvalidRequest(f"{name}: {why}", param=field)


def _key(text: ScoredText) -> Any:
    """Return what is equal for texts that are encoded once."""
    return id(text) if isinstance(text, list) else text


def _prompt(text: ScoredText) -> PoolingPrompt:
    if isinstance(text, str):
        return text
    if isinstance(text, tuple):
        return list(text)
    options = {"add_generation_prompt": False}
    return {"messages": [{"role": "user", "content": text}], "options": options}


async def _by_vectors(
    engine: AsyncEngine,
    pairs: Sequence[tuple[ScoredText, ScoredText]],
    params: PoolingParams,
    fields: tuple[str, str] | None,
    options: dict[str, Any],
) -> list[PoolingRequestOutput]:
    """Score pairs by cosine, or by the vectors of their tokens, encoding each text once."""
    if params.activation is not None:
        raise InvalidRequest(
            "activation: has no meaning for products of vectors", param="activation"
        )
    prompts = {_key(text): _prompt(text) for pair in pairs for text in pair}
    names = None
    if fields is not None:
        firsts = {_key(first) for first, _ in pairs}
        names = [fields[0] if key in firsts else fields[1] for key in prompts]
    outputs = await encode_all(engine, list(prompts.values()), params, fields=names, **options)
    by_text = dict(zip(prompts, outputs, strict=True))
    scores = []
    for first, second in ((by_text[_key(a)], by_text[_key(b)]) for a, b in pairs):
        products = first.outputs.data @ second.outputs.data.T
        score = products.max(axis=1).sum() if products.ndim else products
        scores.append(
            msgspec.structs.replace(
                first,
                prompt=None,
                prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
                outputs=PoolingOutput(np.asarray([score], dtype=np.float32)),
                num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
            )
        )
    return scores

"""Sessions: a prompt that grows. Each input is appended to what was read and written before."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidRequest
from ..inputs import SinglePrompt, text_and_tokens
from ..outputs import RequestOutput
from ..sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from .async_engine import AsyncEngine
    from .request_options import RequestOptions


@dataclass(frozen=True)
class StreamingInput:
    """What is appended to a session's prompt: a text or token ids."""

    prompt: SinglePrompt
    sampling_params: SamplingParams | None = None
    """For the output that follows this input; None: the session's."""


async def session_outputs(
    engine: AsyncEngine,
    inputs: AsyncIterable[StreamingInput],
    params: SamplingParams | None,
    options: RequestOptions,
) -> AsyncIterator[RequestOutput]:
    """Yield the outputs of each input.

    Each input is a request whose prompt begins with all that came before, which the prefix cache
    holds. As in vLLM, the last token of an output does not become part of the prompt.
    """
    if engine.model_config.whole_prompts:
        raise InvalidRequest(
            "a session appends outputs to the prompt, and all tokens of this model's prompts see "
            "each other: send each prompt as a request of its own"
        )
    token_ids: list[int] = []
    async for each in inputs:
        own = each.sampling_params or params
        if own is not None and own.n != 1:
            raise InvalidRequest(f"n must be 1 in a session, got {own.n}", param="n")
        token_ids += await _token_ids(engine, each.prompt, first=not token_ids)
        sampled: list[int] = []
        outputs = engine.generate({"prompt_token_ids": list(token_ids)}, own, **options)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                new = output.outputs[0].token_ids if output.outputs else []
                if own is not None and own.output_kind is OutputKind.DELTA:
                    sampled += new
                else:
                    sampled = list(new)
                yield output
        token_ids += sampled[:-1]


async def _token_ids(engine: AsyncEngine, prompt: SinglePrompt, *, first: bool) -> list[int]:
    """first: the tokenizer adds its own tokens."""
    text, token_ids = text_and_tokens(prompt)
    if token_ids is None:
        [token_ids] = await engine.tokenize_texts([text or ""], add_special_tokens=first)
    if not isinstance(token_ids, list):
        raise InvalidRequest("prompt: must be text or a list of token ids", param="prompt")
    return token_ids

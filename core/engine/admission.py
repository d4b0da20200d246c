"""From what a caller asks to what the scheduler takes: checks against the model, fills defaults."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from ..errors import ContextLengthExceeded, InvalidRequest
from ..extra_args import ExtraArgs
from ..loading.model_config import ModelConfig
from ..scheduling.request import Request
from ..text.token_limit import TokenLimit
from ..text.tokenizer import Tokenizer
from ..types import GrammarStart, Prompt, SamplingParams, all_ints

BadWords: TypeAlias = tuple[tuple[int, ...], ...]
"""Token sequences whose last token may not follow the others."""


def new_scheduler_id() -> str:
    """A name for a request inside the engine."""
    return uuid.uuid4().hex


def _check_choice(params: SamplingParams, eos: frozenset[int], bad_words: BadWords) -> None:
    """Refuse parameters that leave no token to begin with. Raises InvalidRequest."""
    left = set(params.allowed_token_ids or ())
    barred: list[str] = []
    for field, tokens in (
        ("min_tokens", eos.union(params.stop_token_ids) if params.min_tokens else ()),
        ("bad_words", {word[0] for word in bad_words if len(word) == 1}),
    ):
        if not left.isdisjoint(tokens):
            barred.append(field)
            left.difference_update(tokens)
    if not left:
        raise InvalidRequest(
            f"allowed_token_ids: {' and '.join(barred)} leave none of these tokens: with "
            "min_tokens, tokens that end the output are not allowed before",
            param="allowed_token_ids",
        )


class Admission:
    """Makes scheduler requests. Every refusal names the field."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        seed: int,
        max_logprobs: int,
        cache_tokens: int,
        extra_args: ExtraArgs,
    ) -> None:
        """`cache_tokens`: what the whole KV cache holds, which may be less than the context."""
        self.room = min(model_config.max_model_len, cache_tokens + 1)
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.max_logprobs = max_logprobs
        self._extra_args = extra_args
        self._seeds = random.Random(seed)

    def token_limit(self, params: SamplingParams, param: str) -> TokenLimit:
        """Of a prompt's text."""
        context = self.model_config.max_model_len
        keep = params.truncate_prompt_tokens
        if keep is None:
            return TokenLimit(tokens=context - 1, context=context, param=param)
        keep = context if keep == -1 else min(keep, context)
        return TokenLimit(tokens=keep, context=context, cut=params.truncation_side, param=param)

    def token_ids(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Of a prompt that is given as such. Raises InvalidRequest."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" not in prompt:
                raise InvalidRequest("prompt: a dict needs prompt_token_ids", param="prompt")
            prompt = prompt["prompt_token_ids"]
        if not isinstance(prompt, list | tuple):
            raise InvalidRequest("prompt: must be text or a list of token ids", param="prompt")
        # Cut or refused before all of it is looked at.
        prompt = self._truncated(list(prompt), params)
        self._check_num_tokens(prompt)
        if not all_ints(prompt):
            raise InvalidRequest("prompt: must be text or a list of token ids", param="prompt")
        return prompt

    def requests(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int,
        cache_salt: str | None,
        grammar: GrammarStart | None = None,
        bad_words: BadWords = (),
    ) -> list[Request]:
        """`params.n` scheduler requests for one prompt, the first one leading.

        `request_id` is the caller's. The scheduler's ids are drawn here: none that a caller may
        choose can be one of them.
        """
        token_ids = self._truncated(token_ids, params)
        self._check_prompt(token_ids)
        self._check_params(params)
        self._check_length(len(token_ids), params)
        room = self.room - len(token_ids)
        max_tokens = (
            max(room, 1) if params.max_tokens is None else min(params.max_tokens, max(room, 1))
        )
        if params.min_tokens > max_tokens:
            params = msgspec.structs.replace(params, min_tokens=max_tokens)
        eos = frozenset() if params.ignore_eos else self.model_config.eos_token_ids
        if grammar is not None:
            eos = frozenset(grammar.eos_token_ids)
        if params.allowed_token_ids is not None and grammar is None:
            _check_choice(params, eos, bad_words)
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        made: list[Request] = []
        name = new_scheduler_id()
        for index in range(params.n):
            made.append(
                Request(
                    request_id=name if params.n == 1 else f"{name}-{index}",
                    external_id=request_id,
                    prompt_token_ids=token_ids,
                    params=params,
                    max_tokens=max_tokens,
                    seed=seed + index,
                    eos_token_ids=eos,
                    bad_words_token_ids=bad_words,
                    grammar=grammar,
                    priority=priority,
                    cache_salt=cache_salt,
                    leader=made[0] if made else None,
                )
            )
        return made

    def _truncated(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        keep = params.truncate_prompt_tokens
        if keep is None:
            return token_ids
        limit = self.model_config.max_model_len - 1
        if keep == -1:
            asked = 1 if params.max_tokens_field is None else params.max_tokens or 1
            keep = max(limit + 1 - asked, 1)
        elif keep > limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {keep} leaves no room in a context of "
                f"{self.model_config.max_model_len} tokens",
                param="truncate_prompt_tokens",
            )
        return token_ids[:keep] if params.truncation_side == "right" else token_ids[-keep:]

    def _check_length(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        field, asked = params.max_tokens_field, params.max_tokens
        limit = self.model_config.max_model_len
        if field is not None and asked is not None and num_prompt_tokens + asked > limit:
            raise ContextLengthExceeded.of(
                limit,
                num_prompt_tokens,
                f"you requested {num_prompt_tokens + asked} tokens ({num_prompt_tokens} in the "
                f"prompt, {asked} in the completion). Ask for {field} of at most "
                f"{limit - num_prompt_tokens}, or shorten the prompt.",
                param=field,
            )

    def _check_num_tokens(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidRequest("prompt: must have at least one token", param="prompt")
        limit = self.model_config.max_model_len
        if len(token_ids) >= limit:
            raise ContextLengthExceeded.of(
                limit,
                len(token_ids),
                f"your prompt has {len(token_ids)} tokens, and at least one token of output must "
                "fit as well. Shorten the prompt or set truncate_prompt_tokens.",
                param="prompt",
            )

    def _check_prompt(self, token_ids: list[int]) -> None:
        self._check_num_tokens(token_ids)
        vocab = self.model_config.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab:
            wrong = next(t for t in token_ids if not 0 <= t < vocab)
            raise InvalidRequest(
                f"prompt: token id {wrong} is not in the vocabulary (0 to {vocab - 1})",
                param="prompt",
            )

    def _check_params(self, params: SamplingParams) -> None:
        self._extra_args.check(params)
        vocab = self.model_config.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is None or self.max_logprobs == -1:
                continue
            if (vocab if asked == -1 else asked) > self.max_logprobs:
                raise InvalidRequest(
                    f"{name}: {asked} asked, at most max_logprobs={self.max_logprobs} allowed",
                    param=name,
                )
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            tokens = getattr(params, name)
            if tokens and (min(tokens) < 0 or max(tokens) >= vocab):
                token = next(t for t in tokens if not 0 <= t < vocab)
                raise InvalidRequest(
                    f"{name}: token id {token} is not in the vocabulary (0 to {vocab - 1})",
                    param=name,
                )
        if self.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise InvalidRequest(
                        f"{name}: needs a tokenizer, and this engine has none", param=name
                    )

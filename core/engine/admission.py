"""Admission: validates a caller's request once, and fills in its defaults."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from ..audio.source import make_source
from ..config import EngineConfig
from ..errors import ContextLengthExceeded, InvalidRequest
from ..inputs import Prompt, is_single, text_and_tokens
from ..loading.model_config import ModelConfig, SourceConfig
from ..parts.encoder_decoder import Source
from ..parts.media import MediaItem, prompt_extra
from ..protocols.audio import AudioSource
from ..protocols.executors import ExecutorInfo
from ..registration.extra_args import ExtraArgs
from ..request import GrammarRequest, RequestSpec
from ..sampling_params import SamplingParams, all_ints
from ..scheduling.limits import RequestLimits
from ..text.token_limit import TokenLimit
from ..token_lists import barring_fields
from .request_options import Envelope
from .text_processor import TextProcessor

BadWords: TypeAlias = tuple[tuple[int, ...], ...]
"""Token sequences whose last token may not follow the others."""
PROMPTS = frozenset({"encoder_prompt", "decoder_prompt"})
"""Fields of `EncoderDecoderPrompt`."""
NOT_TRUNCATED = SamplingParams()


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as token ids that the model takes."""

    text: str | None
    """The text as passed."""
    token_ids: list[int]
    token_type_ids: tuple[int, ...] = ()
    """[len(token_ids)] or empty: all 0."""
    source_text: str | None = None
    """The encoder's text as passed."""
    source: Source | None = None
    """The encoder's tokens of an encoder-decoder model; the others are the decoder's."""
    media: tuple[MediaItem, ...] = ()


def request_limits(
    config: EngineConfig, model_config: ModelConfig, info: ExecutorInfo
) -> RequestLimits:
    assert config.max_num_batched_tokens is not None
    num_blocks, pooling = info.num_blocks, model_config.pooling
    return RequestLimits(
        # A pooled prompt may fill the whole context: its vector follows the last token.
        max_model_len=model_config.max_model_len + (pooling is not None),
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill and not model_config.whole_prompts,
        num_blocks=num_blocks - 1 if num_blocks else None,  # Without the null block.
        block_size=config.block_size,
        groups=info.cache_groups,
        max_chunk=config.max_num_batched_tokens,
    )


def check_vocabulary(token_ids: list[int], vocab_size: int, field: str = "prompt") -> None:
    """Raise InvalidRequest for a token id outside the vocabulary."""
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        token = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise InvalidRequest(
            f"{field}: token id {token} is not in the vocabulary (0 to {vocab_size - 1})",
            param=field,
        )


def check_limits(limits: RequestLimits, num_prompt_tokens: int, max_tokens: int) -> None:
    """Raise InvalidRequest for a request that cannot finish."""
    reason = limits.rejection_reason(num_prompt_tokens, num_prompt_tokens + max_tokens)
    if reason is not None:
        raise InvalidRequest(f"prompt: {reason}", param="prompt")


def _check_choice(
    params: SamplingParams, eos: frozenset[int], bad_words: BadWords, vocab_size: int
) -> None:
    """Raise InvalidRequest if no first token is possible."""
    stops = eos.union(params.stop_token_ids)
    fields = barring_fields(params, bad_words, stops, vocab_size)
    if fields:
        param, *others = fields
        beside = f"with {' and '.join(others)}, " if others else ""
        raise InvalidRequest(
            f"{param}: {beside}no token is left that may begin the output (before min_tokens, none "
            "that ends it)",
            param=param,
        )


class Admission:
    """Validates requests for text. Every refusal names the field."""

    def __init__(
        self,
        model_config: ModelConfig,
        texts: TextProcessor,
        limits: RequestLimits,
        *,
        max_logprobs: int,
        max_logprobs_per_request: int,
        extra_args: ExtraArgs,
        compresses: bool,
        leveled: bool = False,
    ) -> None:
        """compresses: caches are compressed, so requests may set how much; leveled: but levels
        do.
        """
        self.model_config = model_config
        self.texts = texts
        self.limits = limits
        self.max_logprobs = max_logprobs
        self.max_logprobs_per_request = max_logprobs_per_request
        self._longest = limits.longest_sequence()
        self._extra_args = extra_args
        self._compresses = compresses
        self._leveled = leveled
        # Outputs follow a decoder's prompt, not an encoder's.
        self._longest_prompt = model_config.max_model_len - (model_config.source is None)

    def token_limit(self, params: SamplingParams, param: str) -> TokenLimit:
        """Return how much of a prompt's text to tokenize."""
        context = self.model_config.max_model_len
        num_kept = params.truncate_prompt_tokens
        if num_kept is None:
            return TokenLimit(tokens=self._longest_prompt, context=context, param=param)
        num_kept = context if num_kept == -1 else min(num_kept, context)
        return TokenLimit(tokens=num_kept, context=context, cut=params.truncation_side, param=param)

    async def prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedPrompt:
        """Tokenize, truncate and check a prompt.

        Raises InvalidRequest, ContextLengthExceeded, EngineOverloaded.
        """
        source = self.model_config.source
        if source is not None and source.audio is not None:
            return await self._prepare_audio(prompt, source, source.audio)
        if isinstance(prompt, Mapping) and not is_single(prompt):
            if source is None or "encoder_prompt" not in prompt or set(prompt) - PROMPTS:
                both = "" if source is None else ", or encoder_prompt and perhaps decoder_prompt"
                raise InvalidRequest(
                    f"prompt: a dict needs prompt or prompt_token_ids{both}", param="prompt"
                )
            return await self._prepare_both(prompt, params, source)
        text, token_ids = await self._read(prompt, params, "prompt")
        return self.prepare_tokens(token_ids, params, text)

    async def _prepare_both(
        self, prompts: Mapping[str, Any], params: SamplingParams, source: SourceConfig
    ) -> PreparedPrompt:
        text, token_ids = await self._read(prompts["encoder_prompt"], params, "encoder_prompt")
        prompt = self._prepare_source(token_ids, params, text, source, "encoder_prompt")
        return await self._with_decoder_prompt(
            prompt, prompts.get("decoder_prompt"), source, "decoder_prompt"
        )

    async def _prepare_audio(
        self, prompt: Any, source: SourceConfig, audio: AudioSource
    ) -> PreparedPrompt:
        """Prepare a prompt of a model that reads audio; its text or tokens are the decoder's."""
        given, field = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}, "prompt"
        if "encoder_prompt" in given:
            given, decoder_prompt = given["encoder_prompt"], given.get("decoder_prompt")
            field = "decoder_prompt"
            if not isinstance(given, Mapping) or given.get("prompt") or "prompt_token_ids" in given:
                raise InvalidRequest(
                    "encoder_prompt: this model's encoder reads audio alone: "
                    '{"multi_modal_data": {"audio": (samples, sampling rate)}}',
                    param="encoder_prompt",
                )
        else:
            decoder_prompt = {k: value for k, value in given.items() if k != "multi_modal_data"}
            decoder_prompt = decoder_prompt or None
        recording = await asyncio.to_thread(make_source, audio, given.get("multi_modal_data"))
        begin = [source.decoder_start_token_id]
        if source.forced_bos_token_id is not None:
            begin.append(source.forced_bos_token_id)
        prepared = PreparedPrompt(None, begin, source=recording)
        return await self._with_decoder_prompt(prepared, decoder_prompt, source, field)

    async def _with_decoder_prompt(
        self, prompt: PreparedPrompt, decoder_prompt: Any, source: SourceConfig, field: str
    ) -> PreparedPrompt:
        if decoder_prompt is None:
            return prompt
        start = source.decoder_start_token_id
        # It is continued, so no token may end it.
        text, token_ids = await self._read(
            decoder_prompt, NOT_TRUNCATED, field, add_special_tokens=False
        )
        # Text from before an audio's own goes before its start.
        begins = token_ids[:1] == [start] or (source.audio is not None and start in token_ids)
        token_ids = token_ids if begins else [start, *token_ids]
        self._check_num_tokens(token_ids, field)
        check_vocabulary(token_ids, self.model_config.vocab_size, field)
        return dataclasses.replace(prompt, text=text, token_ids=token_ids)

    async def _read(
        self, prompt: Any, params: SamplingParams, field: str, *, add_special_tokens: bool = True
    ) -> tuple[str | None, list[int]]:
        """Return a prompt's text, if any, and its token ids; given tokens are truncated, and
        checked to be integers unless too many.
        """
        text, given = text_and_tokens(prompt, field)
        if text is not None and given is None:
            limit = self.token_limit(params, field)
            [token_ids] = await self.texts.tokenize(
                [text], limit, add_special_tokens=add_special_tokens
            )
            return text, token_ids
        if not isinstance(given, list | tuple):
            raise InvalidRequest(f"{field}: must be text or a list of token ids", param=field)
        # Truncated and counted before every item is checked: it may be very long.
        tokens = self._truncate(list(given), params)
        if len(tokens) <= self._longest_prompt and not all_ints(tokens):
            raise InvalidRequest(f"{field}: must be text or a list of token ids", param=field)
        return text, tokens

    def prepare_tokens(
        self, token_ids: list[int], params: SamplingParams, text: str | None = None
    ) -> PreparedPrompt:
        source = self.model_config.source
        if source is not None:
            return self._prepare_source(token_ids, params, text, source, "prompt")
        token_ids = self._truncate(token_ids, params)
        self._check_num_tokens(token_ids)
        check_vocabulary(token_ids, self.model_config.vocab_size)
        return PreparedPrompt(text, token_ids)

    def place(
        self, prompt: PreparedPrompt, token_ids: list[int], items: tuple[MediaItem, ...]
    ) -> PreparedPrompt:
        """Return a prompt with items, whose tokens are among these."""
        self._check_num_tokens(token_ids)
        check_vocabulary(token_ids, self.model_config.vocab_size)
        return dataclasses.replace(prompt, token_ids=token_ids, media=items)

    def _prepare_source(
        self,
        token_ids: list[int],
        params: SamplingParams,
        text: str | None,
        source: SourceConfig,
        field: str,
    ) -> PreparedPrompt:
        """Truncate and check an encoder's prompt; the model sets the decoder's start."""
        token_ids = self._truncate(token_ids, params)
        if not token_ids:
            raise InvalidRequest(f"{field}: must have at least one token", param=field)
        limit = self.model_config.max_model_len
        if len(token_ids) > limit:
            raise ContextLengthExceeded.of(
                limit,
                len(token_ids),
                f"your {field} has {len(token_ids)} tokens. Shorten it or set "
                "truncate_prompt_tokens.",
                param=field,
            )
        check_vocabulary(token_ids, self.model_config.vocab_size, field)
        begin = [source.decoder_start_token_id]
        if source.forced_bos_token_id is not None:
            begin.append(source.forced_bos_token_id)
        return PreparedPrompt(None, begin, source_text=text, source=Source(token_ids))

    async def admit(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        grammar: GrammarRequest,
        envelope: Envelope,
    ) -> RequestSpec:
        """Check the parameters with this prompt, and fill in defaults."""
        num_prompt = len(prompt.token_ids)
        self._check_params(params)
        self._check_length(num_prompt, params)
        bad_words = await self.texts.tokenize_bad_words(params)
        limits, longest = self.limits, self._longest
        if (source := self.model_config.source) is not None:
            bad_words += source.bad_words_token_ids
            assert prompt.source is not None, "every request of such a model has one"
            limits = limits.beside_source(prompt.source.num_tokens)
            longest = limits.longest_sequence()
        room = max(longest - num_prompt, 1)
        if params.max_tokens is None:
            max_tokens = self._room_for_logprobs(params, num_prompt, room)
        else:
            max_tokens = min(params.max_tokens, room)
            self.check_num_logprobs([num_prompt], params)
        check_limits(limits, num_prompt, max_tokens)
        if params.min_tokens > max_tokens:
            params = msgspec.structs.replace(params, min_tokens=max_tokens)
        eos = frozenset() if params.ignore_eos else self.model_config.eos_token_ids
        if params.structured_outputs is None:
            _check_choice(params, eos, bad_words, self.model_config.vocab_size)
        extra: tuple[tuple[int, str], ...] = ()
        if self.model_config.whole_prompts:
            extra = (prompt_extra(prompt.token_ids, prompt.media),)
        return RequestSpec(
            **envelope._asdict(),
            prompt_token_ids=prompt.token_ids,
            params=params,
            max_tokens=max_tokens,
            eos_token_ids=eos,
            bad_words_token_ids=bad_words,
            grammar=grammar,
            source=prompt.source,
            late_extra=extra,
            media=prompt.media,
        )

    def check_num_logprobs(self, prompt_lengths: Sequence[int], params: SamplingParams) -> None:
        """Raise InvalidRequest if these prompts get too many log-probabilities in total, which are
        all in memory until the response is built.
        """
        prompt_width, width = self._num_logprobs(params)
        if self.max_logprobs_per_request == -1 or not (prompt_width or width):
            return
        longest = kept = self.model_config.max_model_len
        if (num_kept := params.truncate_prompt_tokens) is not None and num_kept != -1:
            kept = min(num_kept, longest)
        lengths = [min(length, kept) for length in prompt_lengths]
        most = longest if params.max_tokens is None else params.max_tokens
        in_prompts = prompt_width * sum(lengths)
        num_tokens = sum(min(most, max(longest - length, 1)) for length in lengths)
        self._check_num_logprobs(params, in_prompts, width * params.n * num_tokens)

    def _room_for_logprobs(self, params: SamplingParams, num_prompt: int, room: int) -> int:
        """Return how many of `room` tokens may have log-probabilities. Raises InvalidRequest for
        none.
        """
        prompt_width, width = self._num_logprobs(params)
        if self.max_logprobs_per_request == -1:
            return room
        in_prompt, per_token = prompt_width * num_prompt, width * params.n
        self._check_num_logprobs(params, in_prompt, per_token)
        if not per_token:
            return room
        return min(room, (self.max_logprobs_per_request - in_prompt) // per_token)

    def most_logprobs(self, spec: RequestSpec) -> int:
        """Return how many log-probabilities an admitted request may get."""
        prompt_width, width = self._num_logprobs(spec.params)
        return prompt_width * len(spec.prompt_token_ids) + width * spec.params.n * spec.max_tokens

    def _num_logprobs(self, params: SamplingParams) -> tuple[int, int]:
        """Return the log-probabilities per prompt token, and per output token."""
        prompt, output = (
            0 if count is None else 1 + (self.model_config.vocab_size if count == -1 else count)
            for count in (params.prompt_logprobs, params.logprobs)
        )
        return prompt, output

    def _check_num_logprobs(self, params: SamplingParams, in_prompts: int, in_outputs: int) -> None:
        """Raise InvalidRequest beyond a request's limit."""
        limit = self.max_logprobs_per_request
        if in_prompts + in_outputs <= limit:
            return
        counts = []
        if in_prompts:
            counts.append(f"prompt_logprobs={params.prompt_logprobs} of all prompts: {in_prompts}")
        if in_outputs:
            field = params.max_tokens_field or "max_tokens"
            what = f"logprobs={params.logprobs} with n={params.n}"
            if params.max_tokens is not None:
                what += f" and {field}={params.max_tokens}"
            counts.append(f"{what}: {in_outputs}")
        param = "prompt_logprobs" if in_prompts > in_outputs else "logprobs"
        raise InvalidRequest(
            f"{param}: {in_prompts + in_outputs} log-probabilities in all "
            f"({'; '.join(counts)}), at most max_logprobs_per_request={limit} allowed",
            param=param,
        )

    def _truncate(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        num_kept = params.truncate_prompt_tokens
        if num_kept is None:
            return token_ids
        limit = self.model_config.max_model_len - 1
        if num_kept == -1:
            output = 1 if params.max_tokens_field is None else params.max_tokens or 1
            num_kept = max(limit + 1 - output, 1)
        elif num_kept > limit:
            raise InvalidRequest(
                f"truncate_prompt_tokens: {num_kept} leaves no room in a context of "
                f"{self.model_config.max_model_len} tokens",
                param="truncate_prompt_tokens",
            )
        return token_ids[:num_kept] if params.truncation_side == "right" else token_ids[-num_kept:]

    def _check_length(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        field, max_tokens = params.max_tokens_field, params.max_tokens
        limit = self.model_config.max_model_len
        if field is None or max_tokens is None:
            return
        if num_prompt_tokens + max_tokens > limit:
            raise ContextLengthExceeded.of(
                limit,
                num_prompt_tokens,
                f"you requested {num_prompt_tokens + max_tokens} tokens "
                f"({num_prompt_tokens} in the prompt, {max_tokens} in the completion). "
                f"Ask for {field} of at most {limit - num_prompt_tokens}, or shorten the prompt.",
                param=field,
            )

    def _check_num_tokens(self, token_ids: list[int], field: str = "prompt") -> None:
        if not token_ids:
            raise InvalidRequest(f"{field}: must have at least one token", param=field)
        limit = self.model_config.max_model_len
        if len(token_ids) >= limit:
            raise ContextLengthExceeded.of(
                limit,
                len(token_ids),
                f"your {field} has {len(token_ids)} tokens, and at least one token of output must "
                "fit as well. Shorten it or set truncate_prompt_tokens.",
                param=field,
            )

    def _check_params(self, params: SamplingParams) -> None:
        self._extra_args.check(params)
        compression = params.kv_compression
        if compression is not None and compression.enabled and not self._compresses:
            raise InvalidRequest(
                "kv_compression: this engine compresses no caches (its option kv_compression "
                "names no compressor)",
                param="kv_compression",
            )
        if compression is not None and compression.enabled and self._leveled:
            raise InvalidRequest(
                "kv_compression: this engine's levels say how many tokens stay (its option "
                'kv_compression_levels); a request may say "off" alone',
                param="kv_compression",
            )
        vocab = self.model_config.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is None or self.max_logprobs == -1:
                continue
            if (vocab if count == -1 else count) > self.max_logprobs:
                raise InvalidRequest(
                    f"{name}: {count} asked, at most max_logprobs={self.max_logprobs} allowed",
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
        if self.texts.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise InvalidRequest(
                        f"{name}: needs a tokenizer, and this engine has none", param=name
                    )

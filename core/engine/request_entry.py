"""Validates each request once, and adds it to the core."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from typing import Any, TypeVar, Unpack

import msgspec

from ..errors import InvalidRequest, shown
from ..inputs import ChatMessage, Prompt, is_single
from ..lora_request import AdapterRef
from ..media.media_input import MediaInput
from ..media.prompt_embeds import FIELD, embeds_items
from ..media.sources import MediaSource, of_prompt, split, with_options
from ..pooling_params import PoolingParams
from ..registration.extra_args import ExtraArgs
from ..registry import Plugins
from ..request import GrammarRequest
from ..sampling_params import MAX_NAME_LENGTH, SamplingParams
from ..text.token_limit import LONG_TEXT, TokenLimit
from .admission import Admission, PreparedPrompt, request_limits
from .core_client import CoreClient
from .pooling import PoolingAdmission, PoolingPrompt, PoolingState
from .request_options import Envelope
from .request_state import RequestState
from .text_processor import ChatOptions, TextProcessor

S = TypeVar("S", RequestState, PoolingState)


class RequestEntry:
    def __init__(self, core: CoreClient, texts: TextProcessor, plugins: Plugins) -> None:
        self.core = core
        self.texts = texts
        self._is_heard = plugins.has_listeners("request_finished")
        model_config, config = core.model_config, core.config
        self._drafts = config.speculative_config is not None
        limits = request_limits(config, model_config, core.info)
        pooling = model_config.pooling
        self.pooling_admission = (
            PoolingAdmission(model_config, pooling, texts, limits) if pooling else None
        )
        self.admission = Admission(
            model_config,
            texts,
            limits,
            max_logprobs=config.max_logprobs,
            max_logprobs_per_request=config.max_logprobs_per_request,
            extra_args=ExtraArgs(plugins, config),
            compresses=config.compresses_kv,
            leveled=config.kv_compression_levels is not None,
        )
        self.media: MediaInput | None = None
        """None: prompts have no media."""
        if model_config.media is not None:
            self.media = MediaInput(
                config, model_config, model_config.media, plugins, texts.tokenizer,
                core.info.row_width,
            )  # fmt: skip

    async def start(self) -> None:
        """Raises ConfigError."""
        if self.media is not None:
            self.texts.placeholders |= await self.media.start()

    def close(self) -> None:
        if self.media is not None:
            self.media.close()

    async def complete(
        self, prompt: Prompt, params: SamplingParams | None, envelope: Envelope
    ) -> RequestState:
        sampling = self._sampling(params)
        envelope = self._open(envelope)
        if isinstance(prompt, Mapping) and prompt.get(FIELD) is not None:
            prepared = await self._of_embeds(prompt, sampling)
            return await self._add(prepared, sampling, envelope, GrammarRequest(chat=False))
        prompt, sources = self._without_media(prompt)
        prepared = await self.admission.prepare(prompt, sampling)
        if sources:
            prepared = await self._with_media(prepared, sources, sampling, "prompt")
        return await self._add(prepared, sampling, envelope, GrammarRequest(chat=False))

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None,
        envelope: Envelope,
        prediction: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestState:
        sampling = self._sampling(params)
        envelope = self._open(envelope)
        limit = self.admission.token_limit(sampling, "messages")
        messages, sources = self._split(messages, options.get("mm_processor_kwargs"))
        token_ids = await self.texts.tokenize_chat(messages, limit, **options)
        prepared = self.admission.prepare_tokens(token_ids, sampling)
        if sources:
            prepared = await self._with_media(prepared, sources, sampling, "messages")
        arguments = self.texts.template_kwargs(options.get("chat_template_kwargs"))
        grammar = GrammarRequest(chat=True, template_arguments=arguments)
        expected = await self._tokenize_prediction(prediction or "")
        return await self._add(prepared, sampling, envelope, grammar, expected)

    async def _tokenize_prediction(self, text: str) -> list[int]:
        """Return the tokens of an expected output, as many as fit; [] if nothing uses them."""
        if not text or not self._drafts:
            return []
        most = self.core.model_config.max_model_len
        limit = TokenLimit(tokens=most, context=most, cut="right", param="prediction")
        tokens = await self.texts.tokenize([text], limit, add_special_tokens=False)
        return tokens[0][:most]

    async def tokenize_chat(
        self,
        messages: Sequence[ChatMessage],
        limit: TokenLimit,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Return the prompt's token ids as `chat` computes them."""
        messages, sources = self._split(messages, options.get("mm_processor_kwargs"))
        token_ids = await self.texts.tokenize_chat(messages, limit, **options)
        if not sources:
            return token_ids
        assert self.media is not None, "there are none without"
        return self.media.placed(token_ids, await self.media.contents(sources), "messages")[0]

    async def _of_embeds(self, prompt: Mapping[str, Any], params: SamplingParams) -> PreparedPrompt:
        """Prepare a prompt of embeddings. Raises InvalidRequest, EngineOverloaded."""
        config, model_config = self.core.config, self.core.model_config
        if not config.enable_prompt_embeds:
            raise InvalidRequest(
                f"{FIELD}: this engine takes texts and token ids (enable_prompt_embeds)",
                param=FIELD,
            )
        for name in ("prompt_logprobs", "truncate_prompt_tokens"):
            if getattr(params, name) is not None:
                raise InvalidRequest(f"{name}: a prompt of embeddings has no tokens", param=name)
        if set(prompt) - {FIELD, "prompt"}:
            raise InvalidRequest(f"prompt: gives {FIELD}, and nothing beside it", param="prompt")
        value = prompt[FIELD]
        read = functools.partial(
            embeds_items, value, model_config.hidden_size, model_config.max_model_len - 1
        )
        size = len(value) if isinstance(value, str | bytes) else LONG_TEXT
        token_ids, items = await self.texts.run(size, read)
        return self.admission.place(PreparedPrompt(prompt.get("prompt"), []), token_ids, items)

    # ------------------------------------------------------------ media

    def _split(
        self, messages: Sequence[ChatMessage], options: Mapping[str, Any] | None
    ) -> tuple[Sequence[ChatMessage], list[MediaSource]]:
        """Return the messages, with media by type alone, and the sources of these."""
        if options and self.media is None:
            raise InvalidRequest(
                "mm_processor_kwargs: this engine takes text alone", param="mm_processor_kwargs"
            )
        modalities = () if self.media is None else self.media.modalities
        messages, sources = split(messages, modalities, self.core.model_config.text_alone)
        return messages, with_options(sources, options)

    def _without_media(self, prompt: Prompt) -> tuple[Prompt, list[MediaSource]]:
        """Return a prompt without `multi_modal_data`, and the sources there."""
        data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        source = self.core.model_config.source
        if not data or (source is not None and source.audio is not None):
            return prompt, []
        if self.media is None:
            reason = self.core.model_config.text_alone or "this model reads text"
            raise InvalidRequest(
                f"multi_modal_data: this engine takes text alone: {reason}",
                param="multi_modal_data",
            )
        rest: Any = {key: value for key, value in prompt.items() if key != "multi_modal_data"}  # type: ignore[union-attr]
        if isinstance(rest.get("prompt"), str):
            for placeholder in self.texts.placeholders.values():
                rest["prompt"] = rest["prompt"].replace(placeholder.text, placeholder.whole)
        options = rest.pop("mm_processor_kwargs", None)
        return rest, with_options(of_prompt(data, self.media.modalities), options)

    async def _with_media(
        self,
        prompt: PreparedPrompt,
        sources: Sequence[MediaSource],
        params: SamplingParams | PoolingParams,
        field: str,
    ) -> PreparedPrompt:
        """Put items into a prompt. Raises InvalidRequest."""
        assert self.media is not None, "there are none without"
        if params.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens: a prompt with pictures is not truncated; leave it out",
                param="truncate_prompt_tokens",
            )
        contents = await self.media.contents(sources)
        admission = self.pooling_admission or self.admission
        return admission.place(prompt, *self.media.placed(prompt.token_ids, contents, field))

    async def encode(
        self,
        prompt: PoolingPrompt,
        params: PoolingParams | None,
        envelope: Envelope,
        add_special_tokens: bool,
    ) -> PoolingState:
        self.core.requests.check_accepting()
        admission = self.pooling_admission
        if admission is None:
            raise InvalidRequest(
                "encode: this model generates text; start it with --runner pooling to have its "
                "hidden states pooled",
                param="model",
            )
        pooling = admission.pooling.completed(params or PoolingParams())
        envelope = self._open(envelope)
        field, sources = "prompt", list[MediaSource]()
        if isinstance(prompt, Mapping) and "messages" in prompt:
            conversation: Any = prompt
            field, options = "messages", dict(conversation.get("options") or {})
            messages, sources = self._split(conversation[field], options.get("mm_processor_kwargs"))
            longest = self.core.model_config.max_model_len
            limit = TokenLimit(tokens=longest, context=longest, param=field)
            prompt = await self.texts.tokenize_chat(messages, limit, **options)
        elif isinstance(prompt, Mapping) and is_single(prompt):
            prompt, sources = self._without_media(prompt)  # type: ignore[arg-type, assignment]
        prepared = await admission.prepare(prompt, pooling, add_special_tokens)
        if sources:
            prepared = await self._with_media(prepared, sources, pooling, field)
        spec = admission.admit(prepared, pooling, envelope)
        return await self.core.add_request(
            spec,
            lambda requests: self._with_context(PoolingState(prepared.text, requests[0])),
        )

    async def _add(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        envelope: Envelope,
        grammar: GrammarRequest,
        prediction: Sequence[int] = (),
    ) -> RequestState:
        """prediction: tokens of the expected output."""
        spec = await self.admission.admit(prompt, params, grammar, envelope)
        if prediction:
            spec = msgspec.structs.replace(spec, prediction_token_ids=list(prediction))
        num_logprobs = self.admission.most_logprobs(spec)
        return await self.core.add_request(
            spec,
            lambda requests: self._with_context(
                RequestState(
                    prompt.text, requests, self.texts.tokenizer, source=prompt.source_text,
                    num_logprobs=num_logprobs,
                    stream_interval=self.core.config.stream_interval,
                )
            ),
        )  # fmt: skip

    def _with_context(self, state: S) -> S:
        if self._is_heard:
            state.context = copy_context()
        return state

    def _open(self, envelope: Envelope) -> Envelope:
        """Fill in the id. Raises as `CoreClient.check_open`, for bad names, and for a used id.

        Checked before tokenization, and again when added.
        """
        envelope = envelope._replace(request_id=envelope.request_id or uuid.uuid4().hex)
        check_name("request_id", envelope.request_id)
        check_name("cache_salt", envelope.cache_salt or "")
        _check_rank(envelope.data_parallel_rank, self.core.config.data_parallel_size)
        self._check_adapter(envelope.adapter)
        self.core.check_open()
        self.core.requests.check_free(envelope.request_id)
        return envelope

    def _check_adapter(self, adapter: AdapterRef | None) -> None:
        """Raise InvalidRequest for an adapter that cannot be there."""
        if adapter is None:
            return
        if not self.core.config.enable_lora:
            raise InvalidRequest(
                "lora_request: this engine serves no adapters (enable_lora)", param="lora_request"
            )
        check_name("adapter", adapter.name)
        if not isinstance(adapter.path, str):
            raise InvalidRequest(
                f"lora_path: must be a text, got {shown(adapter.path)}", param="lora_path"
            )

    def _sampling(self, params: SamplingParams | None) -> SamplingParams:
        """Return `params`, or the checkpoint's defaults.

        Raises EngineStopped, and InvalidRequest for other types and pooling models.
        """
        self.core.requests.check_accepting()
        pooling = self.core.model_config.pooling
        if pooling is not None:
            tasks = ", ".join(pooling.tasks)
            raise InvalidRequest(
                f"generate: this model gives vectors ({tasks}) and no text", param="model"
            )
        if params is None:
            return self.core.model_config.sampling.params()
        if not isinstance(params, SamplingParams):
            kind = type(params).__name__
            raise InvalidRequest(f"params: must be SamplingParams, got {kind}", param="params")
        return params


def _check_rank(rank: object, size: int) -> None:
    if rank is not None and not (type(rank) is int and 0 <= rank < size):
        raise InvalidRequest(
            f"data_parallel_rank: must be a number from 0 to {size - 1}, got {shown(rank)}",
            param="data_parallel_rank",
        )


def check_name(param: str, name: object) -> None:
    """Raise InvalidRequest unless the name is a short string."""
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
        raise InvalidRequest(
            f"{param}: must be a text of at most {MAX_NAME_LENGTH} characters, got {shown(name)}",
            param=param,
        )

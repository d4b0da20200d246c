"""Prompts as text: chat templates and tokenization, on the event loop or on threads for texts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from ..config import EngineConfig
from ..errors import ConfigError, InvalidRequest, LoadError
from ..inputs import ChatMessage
from ..loading.model_config import ModelConfig, resolve_model_config
from ..registry import Plugins
from ..sampling_params import SamplingParams
from ..text.chat_messages import check_kwargs
from ..text.chat_template import ChatTemplate, Placeholder, RenderOptions
from ..text.template_traits import ContentFormat
from ..text.text_threads import TextThreads, rough_size
from ..text.token_limit import LONG_TEXT, TokenLimit
from ..text.tokenizer import Tokenizer

T = TypeVar("T")
FEW_WORDS = 16
"""Most bad words tokenized on the event loop."""
MAX_PROMPT_ENDS = 100
"""Cached results of `TextProcessor.prompt_end`."""


class ChatOptions(RenderOptions, total=False):
    """How messages become a prompt."""

    chat_template_kwargs: Mapping[str, Any] | None
    chat_template: str | None
    """Replaces the model's template."""
    add_special_tokens: bool
    mm_processor_kwargs: Mapping[str, Any] | None
    """For the request's pictures: options of their processor that make them smaller."""


class TextProcessor:
    def __init__(self) -> None:
        self.tokenizer: Tokenizer | None = None
        self.chat_template_variables: frozenset[str] = frozenset()
        """Names that the chat template reads besides messages and tools."""
        self._control_tokens = False
        self._content_format: ContentFormat = "auto"
        self.template_kwargs = EngineConfig().template_kwargs
        """Adds the configured arguments of the chat template to those of a request."""
        self.placeholders: dict[str, Placeholder] = {}
        """Modality → what stands for its items; set before the first prompt."""
        self._chat_template: ChatTemplate | None = None
        self._prompt_ends: dict[Any, str] = {}
        """Switches of the chat template → its last text."""
        self._threads = TextThreads()

    def load(self, config: EngineConfig, model_config: ModelConfig, plugins: Plugins) -> None:
        """Load tokenizer and chat template, unless skipped. Blocks.

        Raises LoadError for the checkpoint's, ConfigError for the configuration's template.
        """
        if config.skip_tokenizer_init:
            return
        self._control_tokens = config.assistant_control_tokens
        self._content_format = config.chat_template_content_format
        self.template_kwargs = config.template_kwargs
        try:
            check_kwargs(config.template_kwargs(None))
        except InvalidRequest as error:
            option = "default_chat_template_kwargs"
            message = str(error).removeprefix("chat_template_kwargs.")
            raise ConfigError(f"{option}: {message}", param=option) from None
        self.tokenizer = Tokenizer.of_engine(config, model_config, plugins)
        if self.tokenizer.chat_templates:
            try:
                self._chat_template = self._template(self.tokenizer.chat_templates)
            except InvalidRequest as error:
                kind = LoadError if config.chat_template is None else ConfigError
                raise kind(str(error), param="chat_template") from None
            self.chat_template_variables = self._chat_template.variables

    def load_alone(self, config: EngineConfig, plugins: Plugins) -> None:
        """As `load`, for a core in another process. Blocks."""
        self.load(config, resolve_model_config(config, plugins), plugins)

    def close(self) -> None:
        self._threads.close()

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` on a text of `size` characters on a thread.

        Raises EngineOverloaded.
        """
        return await self._threads.run(size, work)

    # ------------------------------------------------------------ chats

    def render_chat(
        self, messages: Sequence[ChatMessage], limit: TokenLimit, **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Return the prompt's token ids. Blocks. Raises InvalidRequest, and as `limit`."""
        source, tools = options.get("chat_template"), options.get("tools")
        template = self._chat_template if source is None else self._template(source)
        if template is None:
            raise InvalidRequest(
                "messages: this model has no chat template; give one with chat_template, or use "
                "completions",
                param="messages",
            )
        return template.render_tokens(
            messages,
            tools=None if tools is None else list(tools),
            add_generation_prompt=options.get("add_generation_prompt", True),
            continue_final_message=options.get("continue_final_message", False),
            template_kwargs=self.template_kwargs(options.get("chat_template_kwargs")),
            documents=options.get("documents"),
            add_special_tokens=options.get("add_special_tokens", False),
            limit=limit,
        )

    async def tokenize_chat(
        self, messages: Sequence[ChatMessage], limit: TokenLimit, **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Run `render_chat` on a thread. Raises EngineOverloaded, too."""
        size = rough_size(
            messages, options.get("tools"), options.get("documents"), options.get("chat_template")
        )
        render = functools.partial(self.render_chat, messages, limit, **options)
        return await self._threads.run(size, render)

    @property
    def joins_pairs(self) -> bool:
        """Whether the chat template joins two texts that are scored."""
        return self._chat_template is not None and self._chat_template.takes_pairs

    def prompt_end(self, chat_template_kwargs: Mapping[str, Any] | None = None) -> str:
        """Return the chat template's last text before a response, or "".

        Only boolean and word arguments count.
        """
        if self._chat_template is None:
            return ""
        switches = {
            name: value
            for name, value in self.template_kwargs(chat_template_kwargs).items()
            if isinstance(value, bool | str | None) and len(str(value)) < 17
        }
        key = tuple(sorted(switches.items(), key=repr))
        if key not in self._prompt_ends:
            try:
                text = self._chat_template.render(
                    [{"role": "user", "content": "."}], template_kwargs=switches
                )
            except InvalidRequest:
                text = ""
            if len(self._prompt_ends) >= MAX_PROMPT_ENDS:
                self._prompt_ends.clear()
            self._prompt_ends[key] = text[-256:]
        return self._prompt_ends[key]

    def _template(self, source: str | Mapping[str, str]) -> ChatTemplate:
        return ChatTemplate(
            source,
            self.tokenizer,
            assistant_control_tokens=self._control_tokens,
            content_format=self._content_format,
            placeholders=self.placeholders,
        )

    # ------------------------------------------------------------ texts

    async def tokenize(
        self, texts: Sequence[str], limit: TokenLimit, *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return each text's token ids, on a thread for long ones.

        Raises InvalidRequest without a tokenizer, as `limit`, and EngineOverloaded.
        """
        tokenizer = self.required_tokenizer()

        def encode() -> list[list[int]]:
            return [
                tokenizer.encode(text, add_special_tokens=add_special_tokens, limit=limit)
                for text in texts
            ]

        return await self.run_if_long(sum(map(len, texts)), encode)

    async def tokenize_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        words = params.bad_words
        if not words:
            return ()
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequest("bad_words: needs a tokenizer", param="bad_words")
        if len(words) <= FEW_WORDS:
            return tokenizer.bad_words_ids(words)
        return await self.run(sum(map(len, words)), lambda: tokenizer.bad_words_ids(words))

    async def run_if_long(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` here, or on a thread for long texts."""
        return work() if size < LONG_TEXT else await self.run(size, work)

    def required_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                "prompt: this engine has no tokenizer (skip_tokenizer_init), send token ids",
                param="prompt",
            )
        return self.tokenizer

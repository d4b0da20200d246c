"""`ChatTemplate`: OpenAI messages to a prompt, as text or as tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template, meta
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from ..errors import InvalidRequest
from .chat_messages import (
    REASONING_END,
    RESERVED,
    Guard,
    check_documents,
    check_kwargs,
    check_messages,
    check_tools,
    guarded,
    same,
)
from .content_parts import reads_parts
from .control_tokens import ControlTokens
from .template_sandbox import TemplateEnvironment
from .token_limit import TokenLimit, encode_within
from .tokenizer import Tokenizer

_SPLITS_THOUGHTS = re.compile(rf"(split|in)\b[^%}}]*{REASONING_END}|{REASONING_END}['\"] in\b")
_END = "\ufdd2"
"""Marks the end of the final message's content while it is rendered to be continued."""


@functools.cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> Template:
    """Compile a template. Engines of one process often have the same."""
    return _environment().from_string(text)


@functools.lru_cache(maxsize=64)
def _names_read(text: str) -> frozenset[str]:
    """Return the names that a template reads and does not set."""
    return frozenset(meta.find_undeclared_variables(_environment().parse(text)))


class ChatTemplate:
    """A model's chat template. Rendering is sandboxed, and bounded in time and size."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        tokenizer: Tokenizer | None = None,
        *,
        assistant_control_tokens: bool = False,
    ) -> None:
        """source: Jinja text; or name → text, where "tool_use" serves requests with tools.

        None: a model without a template, which refuses every chat. assistant_control_tokens: let
        those in assistant messages be tokens. Raises InvalidRequest with param "chat_template"
        where the text is no Jinja.
        """
        sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._tokenizer = tokenizer
        self._guards_assistants = not assistant_control_tokens
        self._sources = sources
        self._templates = {}
        for name, text in sources.items():
            try:
                self._templates[name] = _compiled(text)
            except TemplateSyntaxError as error:
                raise InvalidRequest(
                    f"chat_template: line {error.lineno}: {error.message}", param="chat_template"
                ) from None
            except (RecursionError, ValueError, TemplateError) as error:
                raise InvalidRequest(f"chat_template: {error}", param="chat_template") from None
        self._tokens = {
            f"{name}": value
            for name, value in (tokenizer.special_tokens if tokenizer else {}).items()
        }
        if tokenizer is not None:
            special_tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
            self._tokens.update({k: v for k, v in special_tokens.items() if v is not None})

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set: the valid `template_kwargs`."""
        read: set[str] = set()
        for text in self._sources.values():
            read |= _names_read(text)
        return frozenset(read - RESERVED - self._tokens.keys())

    @functools.cached_property
    def takes_documents(self) -> bool:
        """Whether the template writes documents."""
        return any("documents" in text for text in self._sources.values())

    @functools.cached_property
    def _knows_developers(self) -> bool:
        return any("developer" in text for text in self._sources.values())

    @functools.cached_property
    def _splits_reasoning(self) -> bool:
        """Whether the template itself removes reasoning in `<think>` marks from messages."""
        return any(
            REASONING_END in text and ("reasoning" in text or _SPLITS_THOUGHTS.search(text))
            for text in self._sources.values()
        )

    @functools.cached_property
    def _reads_parts(self) -> bool:
        """Whether content has to be a list of parts for the template to write it."""
        return any(reads_parts(_environment().parse(text)) for text in self._sources.values())

    @functools.cached_property
    def _control(self) -> ControlTokens:
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer; send prompt token ids")
        return self._tokenizer.control_tokens("\n".join(self._sources.values()))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt as text.

        messages: in OpenAI's form; tools: likewise. template_kwargs: variables for the template
        (`enable_thinking`); names of the template's own inputs and of functions are refused.
        documents: for templates that write them. Where the template knows no developers, their
        messages become the system's. Raises InvalidRequest with the path of the offending field.
        """
        return self._render(
            messages,
            tools,
            add_generation_prompt,
            continue_final_message,
            template_kwargs or {},
            documents,
            same,
        )

    def render_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = False,
        limit: TokenLimit | None = None,
    ) -> list[int]:
        """Return the prompt as token ids; arguments and errors as for `render`.

        add_special_tokens: let the tokenizer add its own, beside the template's. limit: see
        `encode_within`; what is far too long is refused before it is rendered.

        Text of messages, tools, documents and template_kwargs never becomes a control token:
        `<|im_end|>` typed there is encoded as plain text. That holds for assistant messages, too:
        the model's reasoning and calls have fields of their own (`reasoning_content`,
        `tool_calls`), and reasoning at the beginning of content is moved there. With
        `assistant_control_tokens`, assistant messages are not guarded, so that markup in them reads
        as tokens again. If nothing of the kind was typed, the tokens are exactly those of the
        rendered text; if it was, the noncharacters U+FDD0 and U+FDD1 in guarded texts read as
        U+FFFD. A template that takes typed text apart and joins it differently is beyond this
        guard.
        """
        control = self._control
        tokenizer = self._tokenizer
        assert tokenizer is not None
        broken = False
        num_chars = 0

        def guard(text: str) -> str:
            nonlocal broken, num_chars
            num_chars += len(text)
            if limit is not None:
                limit.check_characters(num_chars, lambda: tokenizer.characters_per_token)
            marked = control.mark(text)
            broken = broken or marked is not text
            return marked

        text = self._render(
            messages,
            tools,
            add_generation_prompt,
            continue_final_message,
            template_kwargs or {},
            documents,
            guard,
        )
        if not broken:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens, limit=limit)
        return encode_within(
            text,
            limit,
            lambda text: control.encode_marked(text, add_special_tokens=add_special_tokens),
            lambda: tokenizer.characters_per_token,
        )

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
        documents: Sequence[Mapping[str, Any]] | None,
        guard: Guard,
    ) -> str:
        template = self._template(bool(tools))
        check_kwargs(template_kwargs)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: not together with add_generation_prompt",
                param="continue_final_message",
            )
        if documents and not self.takes_documents:
            raise InvalidRequest(
                "documents: this model's chat template takes none; put them into a message",
                param="documents",
            )
        chat = check_messages(
            messages,
            guard,
            guard_assistants=self._guards_assistants,
            # What is to be continued stays as it is.
            split_reasoning=len(messages) - continue_final_message if self._splits_reasoning else 0,
        )
        if not self._knows_developers:
            for message in chat:
                if message["role"] == "developer":
                    message["role"] = "system"
        if continue_final_message:
            final = chat[-1].get("content")
            if not final:
                raise InvalidRequest(
                    "continue_final_message: the final message has no content to continue",
                    param="continue_final_message",
                )
            chat[-1]["content"] = final.replace(_END, "\ufffd") + _END
        if self._reads_parts:
            for message in chat:
                message["content"] = [{"type": "text", "text": message["content"]}]
        variables = {
            **self._tokens,
            **{key: guarded(value, guard, key) for key, value in template_kwargs.items()},
            "messages": chat,
            "tools": check_tools(tools, guard),
            "documents": check_documents(documents, guard),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(template, variables)
        if continue_final_message:
            end = text.rfind(_END)
            if end < 0:
                raise InvalidRequest(
                    "continue_final_message: the chat template does not write the final message "
                    "as it is",
                    param="continue_final_message",
                )
            text = text[:end].replace(_END, "")
        return text

    def _template(self, with_tools: bool) -> Any:
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "this model has no chat template; give one with --chat-template, or send a plain "
                "prompt to /v1/completions",
                param="messages",
            )
        return self._templates[name]

    def _run(self, template: Any, variables: dict[str, Any]) -> str:
        try:
            return _environment().render(template, variables)
        except SecurityError as error:
            raise InvalidRequest(
                f"chat_template: stopped, because {error}", param="chat_template"
            ) from None
        except TemplateError as error:
            raise InvalidRequest(
                f"messages: the chat template refuses them: {error}", param="messages"
            ) from None
        except Exception as error:
            raise InvalidRequest(
                f"messages: the chat template cannot render them: {type(error).__name__}: {error}",
                param="messages",
            ) from None

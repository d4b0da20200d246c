"""`ChatTemplate`: OpenAI messages to a prompt, as text or as tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from ..errors import InvalidRequest
from .chat_messages import (
    PAIR_ROLES,
    RESERVED,
    ROLES,
    Guard,
    Message,
    arguments_object,
    arguments_text,
    check_documents,
    check_kwargs,
    check_messages,
    check_tools,
    guarded,
    same,
)
from .continued_message import cut_at_end, mark_end
from .control_tokens import ControlTokens
from .template_budget import Budget
from .template_fallbacks import (
    Chat,
    Verbatim,
    attempts,
    item_mark,
    joined_parts,
)
from .template_guards import RenderingGuards
from .template_sandbox import TemplateEnvironment
from .template_traits import ContentFormat, TemplateTraits
from .token_limit import TokenLimit, encode_within
from .tokenizer import Tokenizer

_TRIAL_STEPS = 20_000
"""Steps for rendering a small conversation, to probe a template."""


class RenderOptions(TypedDict, total=False):
    """What a chat template gets besides messages."""

    tools: Sequence[Mapping[str, Any]] | None
    """In OpenAI's form."""
    add_generation_prompt: bool
    continue_final_message: bool
    documents: Sequence[Mapping[str, Any]] | None
    """For templates that write them."""


class Placeholder(NamedTuple):
    """What stands for an item in a prompt's text."""

    text: str
    """One control token."""
    before: str = ""
    after: str = ""

    @property
    def whole(self) -> str:
        return f"{self.before}{self.text}{self.after}"


NO_PLACEHOLDERS: Mapping[str, Placeholder] = {}


@functools.cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> Template:
    """Compile a template, cached for all engines of the process."""
    return _environment().from_string(text)


@functools.lru_cache(maxsize=64)
def _tree(text: str) -> nodes.Template:
    return _environment().tree(text)


@functools.lru_cache(maxsize=64)
def _names_read(text: str) -> frozenset[str]:
    """Return the names that a template reads but does not set."""
    return frozenset(meta.find_undeclared_variables(_tree(text)))


class _Refused(Exception):
    """The template does not render these messages."""


class ChatTemplate:
    """A model's chat template. Rendering is sandboxed, and bounded in time and size."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        tokenizer: Tokenizer | None = None,
        *,
        assistant_control_tokens: bool = False,
        content_format: ContentFormat = "auto",
        placeholders: Mapping[str, Placeholder] = NO_PLACEHOLDERS,
    ) -> None:
        """source: Jinja text; or name → text, with "tool_use" for requests with tools; None refuses
        every chat. content_format: whether content is a text or parts. placeholders: modality →
        what stands for its items.


        Raises InvalidRequest with param "chat_template" where the text is no Jinja.
        """
        sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._tokenizer = tokenizer
        self._guards_assistants = not assistant_control_tokens
        self._placeholders = placeholders
        self._sources = sources
        self._templates: dict[str, Template] = {}
        for name, text in sources.items():
            try:
                self._templates[name] = _compiled(text)
            except TemplateSyntaxError as error:
                raise InvalidRequest(
                    f"chat_template: line {error.lineno}: {error.message}", param="chat_template"
                ) from None
            except (RecursionError, ValueError, TemplateError) as error:
                raise InvalidRequest(f"chat_template: {error}", param="chat_template") from None
        self._traits = {
            name: TemplateTraits(
                functools.partial(_tree, text),
                functools.partial(self._tried, name),
                content_format,
            )
            for name, text in sources.items()
        }
        self._tokens = {
            f"{name}": value
            for name, value in (tokenizer.special_tokens if tokenizer else {}).items()
        }
        if tokenizer is not None:
            special_tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
            self._tokens.update({k: v for k, v in special_tokens.items() if v is not None})

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads but does not set: valid `template_kwargs`."""
        read: set[str] = set()
        for text in self._sources.values():
            read |= _names_read(text)
        return frozenset(read - RESERVED - self._tokens.keys())

    @functools.cached_property
    def takes_documents(self) -> bool:
        return any("documents" in text for text in self._sources.values())

    @functools.cached_property
    def takes_pairs(self) -> bool:
        """Whether the template joins a query and a document: it reads both roles."""
        return any(
            all(any(word.value == role for word in words) for role in PAIR_ROLES)
            for words in (
                list(_tree(text).find_all(nodes.Const)) for text in self._sources.values()
            )
        )

    @functools.cached_property
    def _knows_developers(self) -> bool:
        return any("developer" in text for text in self._sources.values())

    @functools.cached_property
    def _control(self) -> ControlTokens:
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer; send prompt token ids")
        written = [placeholder.text for placeholder in self._placeholders.values()]
        return self._tokenizer.control_tokens("\n".join([*self._sources.values(), *written]))

    @functools.cached_property
    def _unsearched(self) -> ControlTokens:
        """Control tokens except those at which a template splits an assistant's content, which it
        must find.
        """
        searched = frozenset().union(*(traits.searched for traits in self._traits.values()))
        return self._control.without(searched)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RenderOptions],
    ) -> str:
        """Return the prompt as text.

        messages: in OpenAI's form; developers' become the system's if the template knows no
        developers. template_kwargs: variables for the template (`enable_thinking`), except its own
        inputs and functions. Raises InvalidRequest with the path of the offending field.
        """
        return self._render(messages, template_kwargs or {}, RenderingGuards(), **options)

    def render_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        limit: TokenLimit | None = None,
        **options: Unpack[RenderOptions],
    ) -> list[int]:
        """Return the prompt as token ids; arguments and errors as for `render`.

        add_special_tokens: let the tokenizer add its own, beside the template's. limit: see
        `encode_within`; far too long texts are refused before rendering.

        Text of messages, tools, documents and template_kwargs never becomes a control token:
        `<|im_end|>` typed there is encoded as plain text. Nor does assistant text: reasoning and
        calls have their own fields (`reasoning_content`, `tool_calls`), and reasoning at the
        beginning of content moves there. With `assistant_control_tokens`, assistant messages are
        not guarded. Without typed control tokens, the result equals the rendered text's tokens;
        with them, U+FDD0 and U+FDD1 in guarded texts become U+FFFD.
        """
        control = self._control
        tokenizer = self._tokenizer
        assert tokenizer is not None
        check_characters = None
        if limit is not None:
            check_characters = functools.partial(
                limit.check_characters, characters_per_token=lambda: tokenizer.characters_per_token
            )
        guards = RenderingGuards(
            control.mark,
            control.mark if self._guards_assistants else same,
            self._unsearched.mark if self._guards_assistants else same,
            check_characters,
        )
        text = self._render(messages, template_kwargs or {}, guards, **options)
        if not guards.broken:
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
        template_kwargs: Mapping[str, Any],
        guards: RenderingGuards,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        name = self._template_name(bool(tools))
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
        roles = (*ROLES, *PAIR_ROLES) if self.takes_pairs else ROLES
        chat = check_messages(messages, self._placeholders, roles)
        if not self._knows_developers:
            for message in chat:
                if message["role"] == "developer":
                    message["role"] = "system"
        if continue_final_message:
            mark_end(chat[-1])
        variables = {
            **self._tokens,
            **{key: guarded(value, guards.guard, key) for key, value in template_kwargs.items()},
            "tools": check_tools(tools, guards.guard),
            "documents": check_documents(documents, guards.guard),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._first_taken(name, chat, variables, guards)
        for modality, placeholder in self._placeholders.items():
            text = text.replace(item_mark(modality), placeholder.text)
            text = text.replace(placeholder.text, placeholder.whole)
        return cut_at_end(text) if continue_final_message else text

    def _first_taken(
        self, name: str, chat: Chat, variables: dict[str, Any], guards: RenderingGuards
    ) -> str:
        """Return the rendering of the first accepted form of the messages.

        Raises InvalidRequest with the refusal of the first form.
        """
        budget = Budget()
        num_characters = guards.num_characters

        def rendered(form: Chat) -> str:
            guards.num_characters = num_characters
            shown = [
                self._as_read(message, self._traits[name], f"messages[{index}]", guards.of(message))
                for index, message in enumerate(form)
            ]
            variables["messages"] = shown
            return self._run(self._templates[name], variables, budget)

        refusal: _Refused | None = None
        for form in attempts(chat):
            try:
                return rendered(form)
            except _Refused as error:
                refusal = refusal or error
        raise InvalidRequest(f"messages: the chat template {refusal}", param="messages")

    def _as_read(
        self, message: Message, traits: TemplateTraits, path: str, guard: Guard
    ) -> Message:
        """Return a guarded message in the template's form."""
        role, content = message["role"], message["content"]
        if content is None:
            content = None if traits.takes_null else ""
        if isinstance(content, list) and not self._takes(content, traits, role):
            content = joined_parts(content)
        if isinstance(content, str) and traits.needs_parts(role):
            content = [{"type": "text", "text": content}]
        shown: Message = {"role": role}
        for key, value in message.items():
            if key not in ("role", "content", "tool_calls"):
                shown[key] = guarded(value, guard, f"{path}.{key}")
        if "tool_calls" in message:
            shown["tool_calls"] = [
                guarded(_as_written(call), guard, f"{path}.tool_calls[{index}]")
                for index, call in enumerate(message["tool_calls"])
            ]
        shown["content"] = guarded(content, guard, f"{path}.content")
        return shown

    def _takes(self, content: list[dict[str, str]], traits: TemplateTraits, role: str) -> bool:
        """Return whether a template writes all of these parts."""
        kinds = {part["type"] for part in content} - {"text"}
        return traits.takes_parts(role) and all(
            traits.takes_item(role, kind, self._placeholders[kind].text) for kind in kinds
        )

    def _tried(self, name: str, variables: dict[str, Any]) -> str | None:
        """Return a rendering, or None if refused."""
        try:
            budget = Budget(_TRIAL_STEPS)
            return self._run(self._templates[name], {**self._tokens, **variables}, budget)
        except (_Refused, InvalidRequest):
            return None

    def _template_name(self, with_tools: bool) -> str:
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "this model has no chat template; give one with --chat-template, or send a plain "
                "prompt to /v1/completions",
                param="messages",
            )
        return name

    def _run(self, template: Template, variables: dict[str, Any], budget: Budget) -> str:
        try:
            return _environment().render(template, variables, budget)
        except SecurityError as error:
            raise InvalidRequest(
                f"chat_template: stopped, because {error}", param="chat_template"
            ) from None
        except TemplateError as error:
            raise _Refused(f"refuses them: {error}") from None
        except Exception as error:
            raise _Refused(f"cannot render them: {type(error).__name__}: {error}") from None


def _as_written(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as an object, or as text if they are none, or must stay
    text.
    """
    function = dict(call["function"])
    arguments = function.get("arguments")
    read = None if isinstance(arguments, Verbatim) else arguments_object(arguments)
    function["arguments"] = str(arguments_text(arguments)) if read is None else read
    return {**call, "function": function}

"""`ChatTemplate`: OpenAI messages to a prompt, as text or as tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import meta
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from ..errors import InvalidRequest
from .control_tokens import ControlTokens
from .template_sandbox import TemplateEnvironment
from .tokenizer import Tokenizer

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "conversation",
        "conversations",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "tokenizer_kwargs",
        "return_assistant_tokens_mask",
        "raise_exception",
        "strftime_now",
        "range",
        "dict",
        "namespace",
        "cycler",
        "joiner",
        "lipsum",
        "self",
    }
)
_MAX_DEPTH = 64
_END = "\ufdd2"
"""Marks the end of the final message's content while it is rendered to be continued."""

Guard = Callable[[str], str]


@functools.cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


class ChatTemplate:
    """A model's chat template. Rendering is sandboxed, and bounded in time and size."""

    def __init__(
        self, source: str | Mapping[str, str] | None, tokenizer: Tokenizer | None = None
    ) -> None:
        """source: Jinja text; or name → text, where "tool_use" serves requests with tools.

        None: a model without a template, which refuses every chat. Raises InvalidRequest with
        param "chat_template" where the text is no Jinja.
        """
        sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._tokenizer = tokenizer
        self._sources = sources
        self._templates = {}
        for name, text in sources.items():
            try:
                self._templates[name] = _environment().from_string(text)
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
            named = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
            self._tokens.update({k: v for k, v in named.items() if v is not None})

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set: what `template_kwargs` may give it."""
        read: set[str] = set()
        for text in self._sources.values():
            read |= meta.find_undeclared_variables(_environment().parse(text))
        return frozenset(read - _RESERVED - self._tokens.keys())

    @functools.cached_property
    def takes_documents(self) -> bool:
        """Whether the template writes documents."""
        return any("documents" in text for text in self._sources.values())

    @functools.cached_property
    def _knows_developers(self) -> bool:
        return any("developer" in text for text in self._sources.values())

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
        """The prompt as text.

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
            _same,
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
    ) -> list[int]:
        """The prompt as token ids; arguments and errors as for `render`.

        add_special_tokens: let the tokenizer add its own, beside the template's.

        Text of users, system prompts, tool results, tools, documents and template_kwargs never
        becomes a control token: `<|im_end|>` typed there is encoded as plain text. Assistant
        messages are not guarded, for they hold markup that the model itself wrote (`<think>`,
        `<tool_call>`) and must read as tokens again. Where nothing of the kind was typed, the
        tokens are exactly those of the rendered text. (Where it was, the noncharacters U+FDD0 and
        U+FDD1 in guarded texts read as U+FFFD.) A template that takes typed text apart and puts
        it together differently is beyond this guard.
        """
        control = self._control
        guarded = False

        def guard(text: str) -> str:
            nonlocal guarded
            marked = control.mark(text)
            guarded = guarded or marked is not text
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
        if guarded:
            return control.encode_marked(text, add_special_tokens=add_special_tokens)
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

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
        _check_kwargs(template_kwargs)
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
        chat = _check_messages(messages, guard)
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
        variables = {
            **self._tokens,
            **{key: _guarded(value, guard, key) for key, value in template_kwargs.items()},
            "messages": chat,
            "tools": _check_tools(tools, guard),
            "documents": _check_documents(documents, guard),
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


# ---------------------------------------------------------------- checking what a request brings


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    for key in kwargs:
        reserved = key in _RESERVED or key.startswith("_") or key.endswith("_token")
        if reserved or not key.isidentifier():
            raise InvalidRequest(
                f"chat_template_kwargs.{key}: is reserved", param=f"chat_template_kwargs.{key}"
            )


def _guarded(value: Any, guard: Guard, path: str, depth: int = 0) -> Any:
    """A copy of a JSON value with every string guarded."""
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"{path}: nested deeper than {_MAX_DEPTH}", param=path)
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {
            guard(str(key)): _guarded(item, guard, path, depth + 1) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_guarded(item, guard, path, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise InvalidRequest(f"{path}: {type(value).__name__} is no JSON value", param=path)


def _same(text: str) -> str:
    return text


def _check_tools(
    tools: Sequence[Mapping[str, Any]] | None, guard: Guard
) -> list[Mapping[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list | tuple):
        raise InvalidRequest(f"tools: must be a list, got {type(tools).__name__}", param="tools")
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise InvalidRequest(
                f'{path}: must be {{"type": "function", "function": {{…}}}}', param=path
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequest(
                f"{path}.function.name: must be a non-empty string", param=f"{path}.function.name"
            )
    return [_guarded(tool, guard, f"tools[{i}]") for i, tool in enumerate(tools)]


def _check_documents(documents: Any, guard: Guard) -> list[Any] | None:
    if not documents:
        return None
    for index, document in enumerate(documents):
        if not isinstance(document, Mapping):
            raise InvalidRequest(
                f"documents[{index}]: must be an object", param=f"documents[{index}]"
            )
    return [_guarded(document, guard, f"documents[{i}]") for i, document in enumerate(documents)]


def _check_messages(messages: Any, guard: Guard) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages: must be a non-empty list", param="messages")
    return [_check_message(m, f"messages[{i}]", guard) for i, m in enumerate(messages)]


def _check_message(message: Any, path: str, guard: Guard) -> dict[str, Any]:
    """One message in the form templates expect: content a string, call arguments objects."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path}: must be an object", param=path)
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(
            f"{path}.role: must be one of {', '.join(_ROLES)}, got {role!r}", param=f"{path}.role"
        )
    if role == "assistant":
        guard = _same
        message = _with_thought(message)
    checked = {
        key: _guarded(value, guard, f"{path}.{key}")
        for key, value in message.items()
        if key not in ("role", "content", "tool_calls")
    }
    checked["role"] = role
    calls = message.get("tool_calls")
    content = _check_content(message.get("content"), f"{path}.content")
    if content is None and not (role == "assistant" and (calls or message.get("function_call"))):
        raise InvalidRequest(f"{path}.content: is missing", param=f"{path}.content")
    if calls:
        if role != "assistant":
            raise InvalidRequest(
                f"{path}.tool_calls: only assistant messages have them", param=f"{path}.tool_calls"
            )
        checked["tool_calls"] = _check_calls(calls, f"{path}.tool_calls")
    checked["content"] = guard(content) if content is not None else ""
    return checked


def _with_thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The thought under both its names, for templates read one or the other."""
    thought = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(thought, str):
        return message
    return {**message, "reasoning_content": thought, "reasoning": thought}


def _check_content(content: Any, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            f"{path}: must be a string or a list of parts, got {type(content).__name__}", param=path
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise InvalidRequest(
                f'{path}[{index}]: must be {{"type": "text", "text": "…"}}; '
                f"{kind!r} parts are not supported",
                param=f"{path}[{index}]",
            )
        texts.append(part[kind])
    return "\n".join(texts)


def _check_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, the way templates write them out."""
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(f"{path}: must be a list", param=path)
    checked = []
    for index, call in enumerate(calls):
        where = f"{path}[{index}].function"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}.name: must be a string", param=f"{where}.name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                raise InvalidRequest(
                    f"{where}.arguments: is not JSON", param=f"{where}.arguments"
                ) from None
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, Mapping):
            raise InvalidRequest(
                f"{where}.arguments: must be a JSON object", param=f"{where}.arguments"
            )
        plain = _guarded({**call, "function": None}, _same, path)
        plain["function"] = _guarded({**function, "arguments": arguments}, _same, where)
        checked.append(plain)
    return checked

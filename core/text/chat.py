"""Chat templates: Jinja in a sandbox, with limits, and user text that stays text.

Whatever a user, a system prompt, a tool or a tool definition says is encoded without recognising
control tokens: typing `<|im_end|>` cannot end a turn. Assistant messages keep their markup, which
models rely on (`<think>`, `<tool_call>`).
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidRequest
from .tokenizer import Tokenizer

MAX_CHARACTERS = 16 << 20
MAX_SECONDS = 5.0
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESERVED = frozenset(
    {
        "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message",
        "bos_token", "eos_token", "pad_token", "unk_token", "chat_template", "documents",
        "raise_exception", "strftime_now", "tojson", "range", "self", "loop", "namespace",
        "return_tensors", "return_dict", "padding", "truncation", "max_length",
    }
)  # fmt: skip
_OPEN, _CLOSE = "\ue0a1", "\ue0a2"
"""Private-use characters around a control token that a user typed."""


class ChatTemplate:
    """One model's template."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Raises InvalidRequest when the template does not parse."""
        self._tokenizer = tokenizer
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"chat_template: does not parse: {error}", param="chat_template"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """→ the prompt's text. Raises InvalidRequest with the field's path."""
        return self._render(
            normalize(messages),
            list(tools) if tools else None,
            add_generation_prompt,
            continue_final_message,
            template_kwargs,
        )

    def render_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """→ the prompt's token ids; control tokens typed by users stay text."""
        guarded = [
            message if message["role"] == "assistant" else self._guard(message)
            for message in normalize(messages)
        ]
        text = self._render(
            guarded,
            self._guard(list(tools)) if tools else None,
            add_generation_prompt,
            continue_final_message,
            template_kwargs,
        )
        return self._encode(text)

    def _guard(self, value: Any) -> Any:
        """Mark the control tokens in every string of a value."""
        if isinstance(value, str):
            value = value.replace(_OPEN, "").replace(_CLOSE, "")
            for token in self._tokenizer.control_tokens:
                if token in value:
                    value = value.replace(token, _OPEN + "".join(f"{c}{_CLOSE}" for c in token))
            return value
        if isinstance(value, Mapping):
            return {key: self._guard(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item) for item in value]
        return value

    def _encode(self, text: str) -> list[int]:
        if _OPEN not in text:
            return self._tokenizer.encode(text, add_special_tokens=False)
        token_ids: list[int] = []
        first, *rest = text.split(_OPEN)
        token_ids.extend(self._tokenizer.encode(first, add_special_tokens=False))
        for piece in rest:
            typed, _, after = piece.rpartition(_CLOSE)
            token_ids.extend(
                self._tokenizer.encode(
                    typed.replace(_CLOSE, ""), add_special_tokens=False, allow_special=False
                )
            )
            token_ids.extend(self._tokenizer.encode(after, add_special_tokens=False))
        return token_ids

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        for name in template_kwargs:
            if name in RESERVED or name.startswith("_"):
                raise InvalidRequest(
                    f"chat_template_kwargs: {name!r} may not be set",
                    param=f"chat_template_kwargs.{name}",
                )
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message: cannot be combined with add_generation_prompt",
                    param="continue_final_message",
                )
            if not isinstance(messages[-1].get("content"), str):
                raise InvalidRequest(
                    "continue_final_message: the last message has no text to continue",
                    param="continue_final_message",
                )
        text = self._generate(
            {
                **self._tokenizer.special_tokens,
                **template_kwargs,
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        if not continue_final_message:
            return text
        final = messages[-1]["content"].strip()
        end = text.rfind(final)
        if not final or end < 0:
            raise InvalidRequest(
                "continue_final_message: this template does not show the last message as it is",
                param="continue_final_message",
            )
        return text[: end + len(final)]

    def _generate(self, variables: Mapping[str, Any]) -> str:
        """Render within limits of size and time."""
        pieces: list[str] = []
        size, deadline = 0, time.monotonic() + MAX_SECONDS
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise InvalidRequest(
                        f"messages: the rendered chat exceeds {MAX_CHARACTERS} characters",
                        param="messages",
                    )
                if time.monotonic() > deadline:
                    raise InvalidRequest(
                        f"messages: the chat template took more than {MAX_SECONDS:.0f} s",
                        param="messages",
                    )
        except InvalidRequest:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise InvalidRequest(
                f"messages: the chat template refused them: {error}", param="messages"
            ) from error
        except (OverflowError, RecursionError, MemoryError) as error:
            raise InvalidRequest(
                f"messages: the chat template went out of bounds: {type(error).__name__}",
                param="messages",
            ) from error
        return "".join(pieces)


def normalize(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI messages as templates expect them. Raises InvalidRequest with the field's path."""
    if not messages:
        raise InvalidRequest("messages: must not be empty", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path}: must be an object", param=path)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{path}.role: must be one of {', '.join(ROLES)}, got {role!r}", param=f"{path}.role"
        )
    made = {key: value for key, value in message.items() if value is not None}
    calls = made.get("tool_calls")
    made["content"] = _content(message.get("content"), f"{path}.content", optional=bool(calls))
    if calls is not None:
        if not isinstance(calls, list):
            raise InvalidRequest(f"{path}.tool_calls: must be a list", param=f"{path}.tool_calls")
        made["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return made


def _content(content: Any, path: str, *, optional: bool) -> str:
    if content is None:
        if optional:
            return ""
        raise InvalidRequest(f"{path}: is missing", param=path)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{path}: must be a string or a list of parts", param=path)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise InvalidRequest(
                f"{path}[{index}]: only text parts are supported, got {kind!r}",
                param=f"{path}[{index}]",
            )
    return "\n".join(texts)


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{path}.function: must have a name", param=f"{path}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise InvalidRequest(
                f"{path}.function.arguments: is not JSON: {error}",
                param=f"{path}.function.arguments",
            ) from error
    return {**call, "function": {**function, "arguments": arguments if arguments else {}}}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training tools; here it shows its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The field's usual template environment (that of `transformers`), sandboxed."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment

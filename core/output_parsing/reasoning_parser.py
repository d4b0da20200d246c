"""Sets up an output's reasoning parser from template arguments and prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..protocols.parsers import ReasoningParser


def thinking_kwarg(parser_class: Any) -> tuple[str, bool]:
    """Return the template argument for reasoning, and its default."""
    name, default = getattr(parser_class, "thinking_switch", ("enable_thinking", True))
    return str(name), bool(default)


def is_thinking(parser_class: Any, chat_template_kwargs: Mapping[str, Any]) -> bool:
    name, default = thinking_kwarg(parser_class)
    return bool(chat_template_kwargs.get(name, default))


def make_parser(
    parser_class: type[ReasoningParser],
    *,
    thinking: bool,
    prompt_end: str = "",
    template_arguments: Mapping[str, Any] | None = None,
) -> ReasoningParser:
    """Create an output's parser.

    prompt_end: the prompt's end; "" if unknown.
    """
    parser = parser_class(thinking=thinking)
    options = getattr(parser_class, "template_options", ())
    for name in options:
        if template_arguments and name in template_arguments:
            setattr(parser, name, bool(template_arguments[name]))
    see_prompt_end = getattr(parser, "see_prompt_end", None)
    if prompt_end and see_prompt_end is not None:
        see_prompt_end(prompt_end)
    return parser

"""A chat request's arguments for the chat template."""

from __future__ import annotations

from typing import Any

from ....core.engine.async_engine import AsyncEngine
from ....core.errors import InvalidRequest, shortened
from ....core.output_parsing.reasoning_parser import thinking_kwarg
from ....core.spelling import nearest
from ..common.protocol import ChatRequest

COMMON_KWARGS = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
"""Accepted for every model, as clients send them to all."""


def template_arguments(engine: AsyncEngine, request: ChatRequest, trusted: bool) -> dict[str, Any]:
    """Return `chat_template_kwargs`, with `reasoning_effort`, and `verbosity` if the template reads
    it, over the engine's defaults. An effort also turns thinking on, "none" off.

    trusted: requests may bring a template. Raises InvalidRequest for a disallowed template, and for
    arguments that nothing reads.
    """
    if request.chat_template is not None and not trusted:
        raise InvalidRequest(
            "chat_template: this server takes none from requests; start it with "
            "--trust-request-chat-template",
            param="chat_template",
        )
    kwargs = dict(request.chat_template_kwargs or {})
    variables = engine.chat_template_variables
    thinking = thinking_switch(engine)
    if request.chat_template is None:
        _check_known(kwargs, variables | COMMON_KWARGS | _parser_kwargs(engine))
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        if thinking is not None:
            kwargs.setdefault(thinking, request.reasoning_effort != "none")
    if request.verbosity is not None and (request.chat_template or "verbosity" in variables):
        kwargs.setdefault("verbosity", request.verbosity)
    return engine.config.template_kwargs(kwargs)


def thinking_switch(engine: AsyncEngine) -> str | None:
    """Return the template argument that turns thinking on and off."""
    name = engine.config.reasoning_parser
    if name is None:
        return None
    name, _ = thinking_kwarg(engine.plugins["reasoning_parser"].load(name))
    return name


def _parser_kwargs(engine: AsyncEngine) -> frozenset[str]:
    name = engine.config.reasoning_parser
    if name is None:
        return frozenset()
    parser = engine.plugins["reasoning_parser"].load(name)
    return frozenset({thinking_kwarg(parser)[0], *getattr(parser, "template_options", ())})


def _check_known(kwargs: dict[str, Any], names: frozenset[str] | set[str]) -> None:
    for name in kwargs:
        if name in names:
            continue
        near = nearest(name, names)
        hint = f"did you mean {near}?" if near else f"it takes {', '.join(sorted(names))}"
        field = f"chat_template_kwargs.{shortened(name)}"
        raise InvalidRequest(
            f"{field}: this model's chat template has no such argument; {hint}", param=field
        )

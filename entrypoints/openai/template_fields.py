"""What a chat request gives the chat template beside its messages: arguments, or another one."""

from __future__ import annotations

import difflib
from typing import Any

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import InvalidRequest
from .protocol import ChatRequest

SWITCHES = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
"""Sent to every model by programs that serve several; a template may not know them."""


def template_arguments(engine: AsyncEngine, asked: ChatRequest, trusted: bool) -> dict[str, Any]:
    """`chat_template_kwargs`, with `reasoning_effort` and `verbosity` where the template reads
    them. An effort also turns the switch of the model's thought on, and "none" turns it off.

    trusted: requests may bring a template of their own. Raises InvalidRequest with the field's
    name: for a template where none is allowed, and for arguments that nothing reads.
    """
    if asked.chat_template is not None and not trusted:
        raise InvalidRequest(
            "chat_template: this server takes none from requests; start it with "
            "--trust-request-chat-template",
            param="chat_template",
        )
    given = dict(asked.chat_template_kwargs or {})
    variables = engine.chat_template_variables
    switch = thought_switch(engine)
    if asked.chat_template is None:
        _check_known(given, variables | SWITCHES | ({switch} if switch else set()))
    if asked.reasoning_effort is not None:
        given.setdefault("reasoning_effort", asked.reasoning_effort)
        if switch is not None:
            given.setdefault(switch, asked.reasoning_effort != "none")
    if asked.verbosity is not None and (asked.chat_template or "verbosity" in variables):
        given.setdefault("verbosity", asked.verbosity)
    return given


def thought_switch(engine: AsyncEngine) -> str | None:
    """The template argument that turns the model's thought on and off."""
    name = engine.config.reasoning_parser
    if name is None:
        return None
    parser = engine.plugins["reasoning_parser"].load(name)
    switch, _ = getattr(parser, "thinking_switch", ("enable_thinking", True))
    return str(switch)


def _check_known(given: dict[str, Any], known: frozenset[str] | set[str]) -> None:
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(known))}"
        raise InvalidRequest(
            f"chat_template_kwargs.{name}: this model's chat template has no such argument; {hint}",
            param=f"chat_template_kwargs.{name}",
        )

"""Finds where the grammar begins after reasoning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ..output_parsing.reasoning_parser import is_thinking, make_parser, thinking_kwarg
from ..step import ReasoningGate
from ..text.tokenizer import Tokenizer


def gate_parser(parser_class: Any, gate: ReasoningGate) -> Callable[[], Any]:
    return functools.partial(make_parser, parser_class, thinking=True, prompt_end=gate.prompt_end)


def make_reasoning_gate(
    parser_class: Any,
    template_arguments: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    prompt_end: str = "",
    free: bool = False,
) -> ReasoningGate | None:
    """Return the gate for a reasoning parser's class; None if the grammar applies at once.

    It does without `reasoning_ended`, and for a model that reasons only sometimes, unless thinking
    is on: a constrained model would open reasoning that it otherwise would not. Free outputs
    (`free`) are exempt.
    """
    if not is_thinking(parser_class, template_arguments):
        return None
    probe = gate_parser(parser_class, ReasoningGate(prompt_end))()
    if getattr(probe, "reasoning_ended", True):
        return None
    probe.feed("A")
    opening = None
    if probe.reasoning_ended:
        name, _ = thinking_kwarg(parser_class)
        if not free and not template_arguments.get(name):
            return None
        ids = (tokenizer.backend.token_to_id(marker) for marker in parser_class.markers[:1])
        opening = tuple(token_id for token_id in ids if token_id is not None)
    return ReasoningGate(prompt_end, opening)

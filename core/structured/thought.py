"""Where a grammar begins for a model that thinks first: what its reasoning parser says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..text.reasoning import make_parser
from ..text.tokenizer import Tokenizer


class Thought(msgspec.Struct, frozen=True):
    """The thought that comes before an answer, or may come."""

    parser: Callable[[], Any]
    """Makes a reasoning parser for one output."""
    opening_ids: tuple[int, ...] | None
    """Tokens that open the thought, for a model that may also answer at once; None: the output
    begins inside the thought."""


def thought_before(
    parser: Any,
    template_arguments: Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    prompt_end: str = "",
    free: bool = False,
) -> Thought | None:
    """By a reasoning parser's class; None when there is no thought to wait for.

    A class without `reasoning_ended` does not say where thought ends: the grammar holds at once.
    So it does for a model that thinks when it likes, unless the request turns thinking on: with
    little else allowed, such a model would open a thought that it never meant to have. That is no
    danger where an output may begin with any text (`free`).
    """
    switch, default = getattr(parser, "thinking_switch", ("enable_thinking", True))
    if not template_arguments.get(switch, default):
        return None
    make = functools.partial(make_parser, parser, thinking=True, prompt_end=prompt_end)
    probe = make()
    if getattr(probe, "reasoning_ended", True):
        return None
    probe.feed("A")
    opening = None
    if probe.reasoning_ended:
        if not free and not template_arguments.get(switch):
            return None
        ids = (tokenizer.backend.token_to_id(marker) for marker in parser.markers[:1])
        opening = tuple(found for found in ids if found is not None)
    return Thought(make, opening)

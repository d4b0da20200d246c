"""`Example`: one conversation that the embedded model learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Example:
    """One conversation. The last message is the answer to learn, and to be judged by."""

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    thinking: bool | None = None
    """The template's enable_thinking; None: not set."""
    accept: list[str] = field(default_factory=list)
    """What the answer must equal (talk, facts, copy) or contain as its last number (the rest)."""


def turn(question: str, answer: str) -> list[dict[str, Any]]:
    """A question and its answer, as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

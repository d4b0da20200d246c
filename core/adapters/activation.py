"""Where an activated adapter (aLoRA, arXiv 2504.12397) begins to act."""

from __future__ import annotations

from collections.abc import Sequence


def first_position(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Return where the last occurrence of the invocation tokens begins in a prompt; None: it has
    none, and the base model acts."""
    # One character per token: vocabularies are smaller than Unicode, and texts are searched fast.
    at = "".join(map(chr, prompt)).rfind("".join(map(chr, invocation)))
    return at if at >= 0 else None

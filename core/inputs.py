"""The accepted forms of prompts and chat messages."""

from __future__ import annotations

from typing import Any, TypeAlias, TypedDict


class TokensPrompt(TypedDict):
    """A prompt given as token ids."""

    prompt_token_ids: list[int]


Prompt: TypeAlias = str | list[int] | TokensPrompt
ChatMessage: TypeAlias = dict[str, Any]

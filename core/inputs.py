"""The accepted forms of prompts and chat messages."""

from __future__ import annotations

from typing import Any, NotRequired, TypeAlias, TypedDict


class TokensPrompt(TypedDict):
    """A prompt given as token ids."""

    prompt_token_ids: list[int]


SinglePrompt: TypeAlias = str | list[int] | TokensPrompt


class EncoderDecoderPrompt(TypedDict):
    """What the encoder of an encoder-decoder model reads, and what its decoder begins with. Either
    alone is a prompt, too: that of the encoder."""

    encoder_prompt: SinglePrompt
    decoder_prompt: NotRequired[SinglePrompt | None]
    """Follows the token that all of the model's outputs begin with, if it does not begin with it;
    None: what the model's configuration says."""


Prompt: TypeAlias = SinglePrompt | EncoderDecoderPrompt
ChatMessage: TypeAlias = dict[str, Any]

"""The accepted forms of prompts and chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypeAlias, TypedDict

from .errors import InvalidRequest, shown

ChatMessage: TypeAlias = dict[str, Any]


class TextPrompt(TypedDict):
    """A prompt given as text."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    """Modality → an item or a list of items, in the order of the placeholders in the prompt: URLs,
    bytes, pictures of Pillow, or arrays [height, width, 3] of uint8."""


class TokensPrompt(TypedDict):
    """A prompt given as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    """Its text, which outputs repeat."""
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    """As `TextPrompt`; each item has one placeholder among the ids."""


class EmbedsPrompt(TypedDict):
    """A prompt given as embeddings (`enable_prompt_embeds`)."""

    prompt_embeds: Any
    """A tensor [num_tokens, hidden_size], or a file of one (torch.save, numpy.save, safetensors) as
    bytes or base64."""


class ChatPrompt(TypedDict):
    """A conversation in place of a prompt, for a model whose states are pooled."""

    messages: list[ChatMessage]
    options: NotRequired[Mapping[str, Any]]
    """Those of the chat template, as `AsyncEngine.chat` takes them."""


SinglePrompt: TypeAlias = str | list[int] | TextPrompt | TokensPrompt


class EncoderDecoderPrompt(TypedDict):
    """What the encoder of an encoder-decoder model reads, and what its decoder begins with. Either
    alone is a prompt, too: that of the encoder."""

    encoder_prompt: SinglePrompt
    decoder_prompt: NotRequired[SinglePrompt | None]
    """Follows the token that all of the model's outputs begin with, if it does not begin with it;
    None: what the model's configuration says."""


Prompt: TypeAlias = SinglePrompt | EncoderDecoderPrompt | EmbedsPrompt


def is_single(prompt: Any) -> bool:
    """Return whether a dict is a TextPrompt or a TokensPrompt."""
    return "prompt" in prompt or "prompt_token_ids" in prompt


def text_and_tokens(prompt: Any, field: str = "prompt") -> tuple[str | None, Any]:
    """Return the text and the token ids of a single prompt, None where it has none; neither is
    validated. Raises InvalidRequest for other keys of a dict that ask for something."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, prompt
    for key, value in prompt.items():
        if key not in ("prompt", "prompt_token_ids") and value not in (None, {}, []):
            raise InvalidRequest(f"{field}: {shown(key)} of a dict is not supported", param=field)
    text = prompt.get("prompt")
    if not isinstance(text, str | None):
        raise InvalidRequest(f"{field}: prompt of a dict must be a text", param=field)
    return text, prompt.get("prompt_token_ids")

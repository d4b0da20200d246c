"""Log-probabilities in three forms: chat, completions, prompt."""

from __future__ import annotations

from typing import Any

from ....core.outputs import Logprob, PositionLogprobs
from ....core.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""OpenAI's value for minus infinity, which JSON does not have."""


def chat_logprobs(
    positions: list[PositionLogprobs], count: int, tokenizer: Tokenizer, as_ids: bool = False
) -> dict[str, Any]:
    """Return a chat's form: one entry per token, with its `count` most likely alternatives.

    as_ids: write tokens as `token_id:N`; their bytes stay.
    """

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": f"token_id:{token}" if as_ids else tokenizer.token_text(token),
            "logprob": max(logprob.logprob, LOWEST),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = []
    for position in positions:
        own = next(iter(position))
        content.append(
            {
                **entry(own, position[own]),
                "top_logprobs": [entry(t, p) for t, p in _ranked(position)[:count]],
            }
        )
    return {"content": content}


def completion_logprobs(
    token_ids: list[int],
    positions: list[PositionLogprobs | None],
    count: int,
    offset: int,
    tokenizer: Tokenizer,
    as_ids: bool = False,
) -> tuple[dict[str, Any], int]:
    """Return the completions' form: parallel lists, with the offset of each token in the text.

    as_ids: write tokens as `token_id:N`. offset: of the first token. Returns (lists, offset of the
    next token).
    """
    fields: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }

    def name(token: int) -> str:
        return f"token_id:{token}" if as_ids else _shown(token, tokenizer)

    for token, position in zip(token_ids, positions, strict=True):
        fields["tokens"].append(name(token))
        fields["text_offset"].append(offset)
        # A character of several tokens counts at its first byte.
        offset += sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(token))
        if position is None:
            fields["token_logprobs"].append(None)
            fields["top_logprobs"].append(None)
            continue
        entries = {token: position[token], **dict(_ranked(position)[:count])}
        fields["token_logprobs"].append(max(position[token].logprob, LOWEST))
        top: dict[str, float] = {}
        for other, entry in entries.items():
            # If several tokens have the same text, keep the likeliest.
            text = name(other)
            top[text] = max(entry.logprob, top.get(text, LOWEST))
        fields["top_logprobs"].append(top)
    return fields, offset


def _shown(token: int, tokenizer: Tokenizer) -> str:
    """Return a token's text; for an incomplete character its bytes, in OpenAI's notation."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(
    positions: list[PositionLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Return vLLM's form: token id → log-probability, one entry per prompt position."""
    if positions is None:
        return None
    return [None if position is None else _prompt_position(position) for position in positions]


def _prompt_position(position: PositionLogprobs) -> dict[str, Any]:
    return {
        str(token): {
            "logprob": max(entry.logprob, LOWEST),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token, entry in position.items()
    }


def _ranked(position: PositionLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(position.items(), key=lambda item: item[1].rank or 0)

"""Log-probabilities in three forms: chat, completions, prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....core.outputs import Logprob, PositionLogprobs
from ....core.text.tokenizer import Tokenizer
from ...http.large_responses import Pieces, in_pieces

LOWEST = -9999.0
"""OpenAI's minus infinity."""
AT_ONCE = 128
"""Positions encoded at once; more become `Pieces`."""


def num_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> int:
    """Return about how many log-probabilities these are."""
    return 0 if not positions else len(positions) * len(positions[-1] or ())


def chat_logprobs(
    positions: list[PositionLogprobs], count: int, tokenizer: Tokenizer, as_ids: bool | None = False
) -> dict[str, Any]:
    """Return chat's form: an entry per token, with `count` alternatives.

    as_ids: write tokens as `token_id:N`; bytes stay.
    """

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": f"token_id:{token}" if as_ids else tokenizer.token_text(token),
            "logprob": max(logprob.logprob, LOWEST),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    def entries(positions: list[PositionLogprobs]) -> list[dict[str, Any]]:
        content = []
        for position in positions:
            own = next(iter(position))
            top = [entry(t, p) for t, p in _ranked(position)[:count]]
            content.append({**entry(own, position[own]), "top_logprobs": top})
        return content

    return {"content": in_pieces(positions, AT_ONCE, entries)}


def completion_logprobs(
    token_ids: list[int],
    positions: list[PositionLogprobs | None],
    count: int,
    offset: int,
    tokenizer: Tokenizer,
    as_ids: bool | None = False,
) -> tuple[dict[str, Any], int]:
    """Return completions' form: parallel lists, with each token's text offset.

    as_ids: write tokens as `token_id:N`. offset: of the first token. Returns (lists, offset of the
    next token).
    """
    if len(token_ids) > AT_ONCE:
        pieces: dict[str, list[bytes]] = {}
        for at in range(0, len(token_ids), AT_ONCE):
            end = at + AT_ONCE
            piece, offset = completion_logprobs(
                token_ids[at:end], positions[at:end], count, offset, tokenizer, as_ids
            )
            for name, values in piece.items():
                pieces.setdefault(name, []).append(msgspec.json.encode(values))
        return {name: Pieces(parts) for name, parts in pieces.items()}, offset
    fields: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }

    def shown(token: int) -> str:
        return f"token_id:{token}" if as_ids else _shown(token, tokenizer)

    for token, position in zip(token_ids, positions, strict=True):
        fields["tokens"].append(shown(token))
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
            text = shown(other)
            top[text] = max(entry.logprob, top.get(text, LOWEST))
        fields["top_logprobs"].append(top)
    return fields, offset


def _shown(token: int, tokenizer: Tokenizer) -> str:
    """Return a token's text, or an incomplete character's bytes in OpenAI's notation."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(
    positions: list[PositionLogprobs | None] | None,
) -> Any:
    """Return vLLM's form: token id → log-probability per position."""
    if positions is None:
        return None

    def entries(positions: list[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
        return [None if position is None else _prompt_position(position) for position in positions]

    return in_pieces(positions, AT_ONCE, entries)


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

"""Maps tokens to bytes, for decoders that join them.

In byte-level BPE and SentencePiece with byte fallback a token's bytes do not depend on its
neighbours, so decoding is a join and one UTF-8 decoding. Other decoders (WordPiece, Metaspace,
none) have no byte table.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec


def _byte_level_alphabet() -> dict[str, int]:
    """Return each byte's printable character in byte-level vocabularies (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


ALPHABET = _byte_level_alphabet()


class BytePieces(msgspec.Struct, frozen=True):
    byte_level: bool
    """Whether characters stand for bytes; else a token is text, or `<0xNN>`."""
    replacements: tuple[tuple[str, str], ...] = ()
    """(text in a token, replacement), in order."""
    strip_start: int = 0
    """Most leading spaces to remove."""

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes of `token` as written in the vocabulary."""
        if self.byte_level:
            try:
                return bytes([ALPHABET[char] for char in token])
            except KeyError:
                return token.encode("utf-8", "replace")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode("utf-8", "replace")


def byte_pieces(decoder: Any) -> BytePieces | None:
    """Read a `tokenizers` decoder; None if tokens are not independent bytes."""
    if decoder is None:
        return None
    spec = json.loads(decoder.__getstate__())
    parts = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    if [part["type"] for part in parts] == ["ByteLevel"]:
        return BytePieces(byte_level=True)
    replacements: list[tuple[str, str]] = []
    seen: list[str] = []
    strip_start = 0
    for part in parts:
        kind = part["type"]
        if kind == "Replace" and not seen and "String" in part["pattern"]:
            replacements.append((part["pattern"]["String"], part["content"]))
            continue
        strips = kind == "Strip" and part["content"] == " " and part["stop"] == 0
        if strips and seen == ["ByteFallback", "Fuse"]:
            strip_start = part["start"]
        elif kind not in ("ByteFallback", "Fuse"):
            return None
        seen.append(kind)
    if "ByteFallback" not in seen:
        return None
    return BytePieces(byte_level=False, replacements=tuple(replacements), strip_start=strip_start)

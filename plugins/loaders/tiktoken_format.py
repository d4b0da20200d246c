"""`TiktokenFormat`: tokenizers of checkpoints whose vocabulary is tiktoken.model, and whose pattern
stands in their own code, which is not run.

A line of the file is a token in base64 and its rank. Source: Kimi's published files.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as Backend

from ...core.errors import LoadError, shown
from ...core.text.tokenizer import Tokenizer
from ...core.text.tokenizer_files import DeclaredTokens, chat_templates, read_json
from .byte_pairs import byte_pairs, merges, spelled

FILE = "tiktoken.model"
CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    "TikTokenTokenizer": "|".join(
        (
            r"\p{Han}+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}*{SMALL}+{ENDING}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}+{SMALL}*{ENDING}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}
"""tokenizer_class → what splits a text first."""
MOST_RESERVED = 1 << 14
"""Published files have 256."""


class TiktokenFormat:
    config_file: ClassVar[str] = "config.json"
    tokenizer_file: ClassVar[str] = FILE
    load_format: ClassVar[str] = "safetensors"

    @staticmethod
    def read_config(folder: Path) -> dict[str, Any]:
        return read_json(folder / "config.json")

    @staticmethod
    def read_chat_templates(folder: Path) -> Mapping[str, str]:
        return chat_templates(folder, read_json(folder / "tokenizer_config.json"))

    @staticmethod
    def read_tokenizer(folder: Path, chat_templates: Mapping[str, str]) -> Tokenizer:
        settings = read_json(folder / "tokenizer_config.json")
        kind = settings.get("tokenizer_class")
        if kind not in PATTERNS:
            raise LoadError(
                f"tokenizer: {folder} has {FILE}, and in tokenizer_config.json the tokenizer_class "
                f"{shown(kind)}; known are {', '.join(PATTERNS)}: give the checkpoint a "
                "tokenizer.json"
            )
        vocabulary = spelled(read_ranks(folder / FILE))
        backend = byte_pairs(vocabulary, merges(vocabulary), Regex(PATTERNS[kind]))
        declared = DeclaredTokens.read(folder, settings)
        add_specials(backend, settings, model_size(folder))
        declared.add_to(backend)
        names = declared.strings
        return Tokenizer(
            backend,
            bos_token=names.get("bos_token"),
            eos_token=names.get("eos_token"),
            chat_templates=chat_templates,
            special_tokens=names,
        )


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the tokens by rank. Raises LoadError."""
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().split(b"\n"):
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        in_order = list(ranks.values()) == list(range(len(ranks)))
        if not in_order or not all(bytes([byte]) in ranks for byte in range(256)):
            raise ValueError("its ranks are not those of different tokens, every byte among them")
    except (OSError, ValueError) as error:
        raise LoadError(f"tokenizer: {file}: {error}") from error
    return ranks


def model_size(folder: Path) -> int:
    """Return the vocabulary's size by config.json; 0: it says none."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    return size if isinstance(size, int) else 0


def add_specials(backend: Backend, settings: Mapping[str, Any], size: int) -> None:
    """Give the ids after the vocabulary to declared tokens; up to `size`, others are reserved.
    Raises LoadError for ids elsewhere."""
    listed = settings.get("added_tokens_decoder")
    first = backend.get_vocab_size()
    try:
        declared = {
            int(number): AddedToken(
                entry["content"], special=bool(entry.get("special")), normalized=False
            )
            for number, entry in (listed or {}).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LoadError(
            f"tokenizer: added_tokens_decoder of tokenizer_config.json cannot be read: {error}"
        ) from error
    end = max(size, 1 + max(declared, default=first - 1))
    if min(declared, default=first) < first or end > first + MOST_RESERVED:
        raise LoadError(
            f"tokenizer: added_tokens_decoder of tokenizer_config.json must have ids from {first}, "
            f"the size of {FILE}, to {first + MOST_RESERVED}"
        )
    tokens = [
        declared.get(number) or AddedToken(f"<|reserved_token_{number}|>", normalized=False)
        for number in range(first, end)
    ]
    if backend.add_tokens(tokens) != len(tokens):
        raise LoadError("tokenizer: added_tokens_decoder names a token twice")

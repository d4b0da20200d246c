"""Reads tekken.json, Mistral's own tokenizer, into one of the `tokenizers` library.

It has a byte vocabulary in merge order, the pattern that first splits a text, and special tokens,
with the lowest ids.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, processors
from tokenizers import Tokenizer as Backend

from ....core.errors import LoadError, shown
from ....core.text.tokenizer_files import read_json
from ..byte_pairs import byte_pairs, merges, spelled

FILE = "tekken.json"
VERSIONS = ("v3", "v7", "v11", "v13", "v15")
"""Versions with known chats (chat_template.jinja)."""
IMPLIED = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens, from id 0, of files without a list, up to v7."""
LATEST_IMPLIED = "v7"
MOST_SPECIALS = 1 << 16
"""Published files have 1000."""
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def read_tekken(folder: Path) -> dict[str, Any]:
    """Return tekken.json's content. Raises LoadError, also for an unknown version."""
    file = folder / FILE
    if not file.is_file():
        raise LoadError(f"tokenizer: {folder} has no {FILE}")
    content = read_json(file)
    config = content.get("config")
    if not isinstance(config, dict):
        raise LoadError(f"tokenizer: {file} has no object config")
    if config.get("version") not in VERSIONS:
        raise LoadError(
            f"tokenizer: {file} is of version {config.get('version')!r}; known are "
            f"{', '.join(VERSIONS)}: give the checkpoint a tokenizer.json, and a chat template"
        )
    return content


def special_tokens(content: Mapping[str, Any]) -> list[str]:
    config, listed = content["config"], content.get("special_tokens")
    count = config.get("default_num_special_tokens")
    if listed is None:
        if VERSIONS.index(config["version"]) > VERSIONS.index(LATEST_IMPLIED):
            raise LoadError(f"tokenizer: {FILE} has no special_tokens")
        tokens = list(IMPLIED)
    else:
        try:
            ranked = sorted((entry["rank"], entry["token_str"]) for entry in listed)
        except (TypeError, KeyError) as error:
            raise LoadError(f"tokenizer: {FILE}: special_tokens cannot be read: {error}") from error
        tokens = [token for _, token in ranked]
        for token in tokens:
            if not _is_text(token):
                raise LoadError(
                    f"tokenizer: {FILE}: special_tokens has the token_str {shown(token)}, which is "
                    "no text"
                )
        in_order = [rank for rank, _ in ranked] == list(range(len(ranked)))
        if not in_order or len(set(tokens)) < len(tokens):
            raise LoadError(
                f"tokenizer: {FILE}: special_tokens must have the ranks 0 to {len(ranked) - 1}, "
                "and each text once"
            )
    if ROLES["bos_token"] not in tokens:
        raise LoadError(
            f"tokenizer: {FILE}: special_tokens lacks {ROLES['bos_token']}, which texts begin with"
        )
    if type(count) is not int or not len(tokens) <= count <= MOST_SPECIALS:
        raise LoadError(
            f"tokenizer: {FILE}: config.default_num_special_tokens is {shown(count)}, and must be "
            f"an integer from {len(tokens)}, the number of special tokens, to {MOST_SPECIALS}"
        )
    return tokens + [f"<SPECIAL_{rank}>" for rank in range(len(tokens), count)]


def _is_text(token: object) -> bool:
    """Return whether a vocabulary may have it: a nonempty text of complete characters."""
    if not isinstance(token, str):
        return False
    return token != "" and not any("\ud800" <= character <= "\udfff" for character in token)


def backend(content: Mapping[str, Any]) -> Backend:
    """Return the tokenizer, equal to tiktoken's with this vocabulary. Raises LoadError for an
    inconsistent file.
    """
    config, specials = content["config"], special_tokens(content)
    size = config.get("default_vocab_size")
    entries = content.get("vocab")
    if not isinstance(size, int) or not isinstance(entries, list):
        raise LoadError(f"tokenizer: {FILE} has no config.default_vocab_size, or no list vocab")
    count = size - len(specials)
    try:
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        ranks = {token: rank for rank, token in enumerate(tokens[:count])}
        complete = len(ranks) == count and all(bytes([byte]) in ranks for byte in range(256))
        if not complete:
            raise ValueError(f"it has no {count} different tokens, every byte among them")
        pattern = Regex(config["pattern"])
    except Exception as error:  # Also the pattern's, for which the library has no type.
        raise LoadError(f"tokenizer: {FILE}: {type(error).__name__}: {error}") from error
    written = spelled(ranks)
    vocabulary = {token: rank for rank, token in enumerate(specials)}
    vocabulary |= {token: rank + len(specials) for token, rank in written.items()}
    if len(vocabulary) < size:
        raise LoadError(f"tokenizer: {FILE}: vocab has the text of a special token as a token")
    tokenizer = byte_pairs(vocabulary, merges(written), pattern)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    begin = ROLES["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[begin, "$A"],
        pair=[begin, "$A", "$B"],
        special_tokens=[(begin, specials.index(begin))],
    )
    return tokenizer

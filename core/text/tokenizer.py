"""The tokenizer of a checkpoint.

`tokenizer.json` is read with the `tokenizers` library alone, which starts in milliseconds; a
checkpoint without one goes through `transformers` (never through code of the checkpoint).
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import InvalidRequest, LoadError


class Tokenizer:
    """Text to token ids and back."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any],
        *,
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.control_tokens = frozenset(token.content for token in added.values())
        """Every added token's text: what a user must not be able to type into a chat."""
        self.eos_token = _token_text(config.get("eos_token"))
        self.bos_token = _token_text(config.get("bos_token"))
        self.special_tokens = {
            name: text
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _token_text(config.get(name))) is not None
        }
        self.eos_token_id = self._id(self.eos_token)
        self.bos_token_id = self._id(self.bos_token)
        self._plain = tokenizers.Tokenizer.from_str(backend.to_str())
        self._plain.encode_special_tokens = True
        self.token_text = lru_cache(maxsize=65536)(self._token_text)

    @classmethod
    def load(
        cls, path: str, *, revision: str | None = None, chat_template: str | None = None
    ) -> Tokenizer:
        """From a folder (or hub name). `chat_template`: Jinja text, or a file's path, instead of
        the checkpoint's. Raises LoadError."""
        folder = Path(path)
        config = _read_json(folder / "tokenizer_config.json")
        try:
            if (folder / "tokenizer.json").is_file():
                backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            else:
                backend = _through_transformers(path, revision)
        except Exception as error:
            raise LoadError(
                f"tokenizer: none can be loaded from {path!r} ({type(error).__name__}: {error}); "
                "set tokenizer, or skip_tokenizer_init",
                param="tokenizer",
            ) from error
        special = _read_json(folder / "special_tokens_map.json")
        return cls(
            backend,
            {**special, **config},
            chat_template=_find_template(folder, config, chat_template),
        )

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """`allow_special=False`: control tokens typed in the text stay text."""
        backend = self.backend if allow_special else self._plain
        ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Ids that no token has are skipped; negative ones raise InvalidRequest."""
        if any(token < 0 for token in token_ids):
            raise InvalidRequest("tokens: token ids are not negative", param="tokens")
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def _token_text(self, token_id: int) -> str:
        """How one token shows in a list of log-probabilities."""
        text: str = self.backend.decode([token_id], skip_special_tokens=False)
        if text and "\ufffd" not in text:
            return text
        return self.backend.id_to_token(token_id) or ""

    def bad_words_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each word as it starts a text and as it follows a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for variant in (word.lstrip(), " " + word.lstrip()):
                ids = tuple(self.encode(variant, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return tuple(found)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LoadError(f"{path.name} cannot be read: {error}") from error
    return data if isinstance(data, dict) else {}


def _through_transformers(path: str, revision: str | None) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    return loaded.backend_tokenizer


def _find_template(folder: Path, config: dict[str, Any], given: str | None) -> str | None:
    if given is not None:
        if "{" not in given and Path(given).is_file():
            return Path(given).read_text()
        if "{" not in given:
            raise LoadError(f"chat_template: no such file: {given}", param="chat_template")
        return given
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None

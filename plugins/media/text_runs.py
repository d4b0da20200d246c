"""Texts between special tokens of a prompt: what is written beside them may become one token with
them, so they are tokenized again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class TextRuns:
    def __init__(self, folder: Path, tokenize: Callable[[str], list[int]], mark: str) -> None:
        """mark: a special token."""
        import transformers

        self._tokenize, self._mark = tokenize, mark
        create: Any = transformers.AutoTokenizer.from_pretrained  # Untyped.
        self._tokenizer: Any = create(folder)
        self.added: frozenset[int] = frozenset(self._tokenizer.get_added_vocab().values())
        """Tokens that are no text."""
        word = tokenize("b a")[len(tokenize("b")) :]
        self.begins_words = self.tokens("a") == word
        """Whether what is behind a special token is the beginning of a word without a space."""

    def tokens(self, text: str, first: bool = False) -> list[int]:
        """Return the tokens of a text behind a special token, or of a prompt's `first`."""
        return self._tokenize(text) if first else self._tokenize(f"{self._mark}{text}")[1:]

    def text(self, tokens: Sequence[int], first: bool = False) -> str | None:
        """Return the text of which these are the tokens; None if it has others."""
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text if self.tokens(text, first) == list(tokens) else None

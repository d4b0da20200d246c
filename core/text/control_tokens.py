"""Keeps typed control tokens plain: `<|im_end|>` is text in a message, a token in a template.

`ControlTokens.mark` breaks typed ones with a Unicode noncharacter before rendering; `encode_marked`
then treats unbroken ones as tokens. It uses a twin tokenizer with renamed control tokens, so that
pieces and normalization stay the tokenizer's.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer as Backend

from .token_limit import encode_text

MARK = "\ufdd0"
"""Inserted after the first character of a typed control token."""
_TWIN = "\ufdd1"
"""Prefix of control tokens in the twin tokenizer."""
SLICE = 1 << 16
"""Characters searched at once."""


def _shown(text: str) -> str:
    return text.replace(MARK, "\ufffd").replace(_TWIN, "\ufffd")


class ControlTokens:
    def __init__(self, backend: Any, contents: Iterable[str]) -> None:
        """backend: a `tokenizers.Tokenizer`; contents: control tokens as written."""
        self._backend = backend
        self.contents = frozenset(text for text in contents if text)
        self._longest = max(map(len, self.contents), default=0)
        pattern = _any_of(self.contents)
        self._typed = re.compile(f"(?={pattern})(.)", re.DOTALL)
        self._standing = re.compile(f"(?:{pattern})(?!{MARK})")

    def without(self, texts: Iterable[str]) -> ControlTokens:
        """Return a copy without the tokens in these texts."""
        kept = [token for token in self.contents if not any(token in text for text in texts)]
        return self if len(kept) == len(self.contents) else ControlTokens(self._backend, kept)

    def mark(self, text: str) -> str:
        """Return `text` with its control tokens (or one cut off at its end) broken by `MARK`."""
        if not self.contents:
            return text
        cut = self._tail_start(text)
        if cut is None and next(self._found(self._typed, text), None) is None:
            return text
        if cut is not None:
            head, tail = _shown(text[:cut]), _shown(text[cut:])
            text = f"{head}{tail[0]}{MARK}{tail[1:]}"
        else:
            text = _shown(text)
        return self._replaced(self._typed, text, lambda match: f"{match[1]}{MARK}")

    def _found(self, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        """As `pattern.finditer`, slice by slice, releasing the interpreter's lock in between."""
        begin, overlap = 0, self._longest + 1
        for slice_end in range(SLICE, len(text) + SLICE, SLICE):
            while begin < slice_end:
                match = pattern.search(text, begin, slice_end + overlap)
                if match is None or match.start() >= slice_end:
                    begin = slice_end
                    break
                yield match
                begin = match.end()

    def _replaced(
        self, pattern: re.Pattern[str], text: str, replace: Callable[[re.Match[str]], str]
    ) -> str:
        parts, end = [], 0
        for match in self._found(pattern, text):
            parts += [text[end : match.start()], replace(match)]
            end = match.end()
        return "".join([*parts, text[end:]]) if parts else text

    def _tail_start(self, text: str) -> int | None:
        """Return the start of a control token cut off at the end of `text`, or None."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if tail[0] in self._first and any(c.startswith(tail) for c in self.contents):
                return start
        return None

    @functools.cached_property
    def _first(self) -> frozenset[str]:
        return frozenset(content[0] for content in self.contents)

    def encode_marked(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        twin, names = self._twin
        twin_text = self._replaced(self._standing, text, lambda match: _TWIN + match[0])
        twin_text = twin_text.replace(MARK, "")
        ids = encode_text(twin, twin_text, add_special_tokens=add_special_tokens).ids
        return [names.get(token, token) for token in ids]

    def encode_plain(self, text: str, *, add_special_tokens: bool) -> list[int]:
        twin, names = self._twin
        encoded = encode_text(twin, _shown(text), add_special_tokens=add_special_tokens)
        return [names.get(token, token) for token in encoded.ids]

    @functools.cached_property
    def _twin(self) -> tuple[Any, dict[int, int]]:
        """The tokenizer with renamed control tokens, and their ids → the real ones."""
        spec = json.loads(self._backend.to_str())
        for token in spec["added_tokens"]:
            if token["content"] in self.contents:
                token["content"] = _TWIN + token["content"]
        model = spec["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {self._twin_name(name): rank for name, rank in vocabulary.items()}
        elif isinstance(vocabulary, list):
            model["vocab"] = [[self._twin_name(name), score] for name, score in vocabulary]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._twin_name(model["unk_token"])
        twin = Backend.from_str(json.dumps(spec))
        names = {}
        for content in self.contents:
            theirs, ours = twin.token_to_id(_TWIN + content), self._backend.token_to_id(content)
            if theirs is not None and ours is not None and theirs != ours:
                names[theirs] = ours
        return twin, names

    def _twin_name(self, name: str) -> str:
        return _TWIN + name if name in self.contents else name


def _any_of(words: Iterable[str]) -> str:
    """Return a pattern for the longest of `words` at a position: a trie without backtracking."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern(root) if root else "(?!)"


def _pattern(node: dict[str, Any]) -> str:
    branches = []
    for char, child in node.items():
        if not char:
            continue
        prefix = char
        while len(child) == 1 and "" not in child:
            [(char, child)] = child.items()
            prefix += char
        branches.append(re.escape(prefix) + (_pattern(child) if set(child) != {""} else ""))
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")

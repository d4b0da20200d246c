"""Newlines that a model writes as escape sequences."""

from __future__ import annotations

import re

from .cursor import EmitText

_NEWLINES = {"\\r\\n": "\n", "\\n": "\n", "\\r": "\r"}
_OPAQUE = {
    "```": "```", "`": "`", "$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]",
    "<tool_call>": "</tool_call>",
}  # fmt: skip
"""Openers of texts whose escapes stay (code, formulas, calls) → closers."""
_DROPPED = (
    "<|im_end|>", *(f"<reserved_{number}>" for number in range(12, 16)),
    *(f"<|reserved_{number}|>" for number in range(12, 16)),
)  # fmt: skip
_TOKENS = (*_NEWLINES, *_OPAQUE, "\\\\", *_DROPPED)
_PATTERN = re.compile("|".join(map(re.escape, sorted(_TOKENS, key=len, reverse=True))))
_BEGINNINGS = {token[:size] for token in _TOKENS for size in range(1, len(token))}
_LONGEST = max(map(len, _TOKENS))


class NewlineEscapes:
    """Replaces `\\n`, `\\r` and `\\r\\n` by newlines, except in code, formulas and calls, or after
    a doubled backslash. Control tokens of MiniCPM-V are dropped.
    """

    def __init__(self, emit: EmitText) -> None:
        self._emit = emit
        self._held = ""
        self._closes = ""
        """Closer of the current opaque text; "" outside."""

    def add(self, text: str, *, final: bool = False) -> None:
        """Pass on the next piece, except an end that may begin something."""
        text, self._held = self._held + text, ""
        parts: list[str] = []
        position = 0
        while position < len(text):
            end = self._next(text, position, parts, final)
            if end == position:
                self._held = text[position:]
                break
            position = end
        if parts:
            self._emit("".join(parts))

    def finish(self) -> None:
        self.add("", final=True)

    def _next(self, text: str, position: int, parts: list[str], final: bool) -> int:
        """Add text up to the next token, or that token; return the position after it, or `position`
        if more text is needed.
        """
        closes = self._closes
        if closes:
            at = text.find(closes, position)
            end = at + len(closes) if at >= 0 else len(text)
            if at < 0 and not final:
                end -= _overlap(text[max(position, end - len(closes) + 1) :], closes)
            parts.append(text[position:end])
            self._closes = "" if at >= 0 else closes
            return end
        match = _PATTERN.search(text, position)
        if not final:
            begin = max(position, len(text) - _LONGEST + 1)
            stop = len(text) if match is None else match.start() + 1
            for at in range(begin, stop):
                if text[at:] in _BEGINNINGS:
                    parts.append(text[position:at])
                    return at
        if match is None:
            parts.append(text[position:])
            return len(text)
        token = match[0]
        parts.append(text[position : match.start()])
        if token in _NEWLINES:
            parts.append(_NEWLINES[token])
        elif token not in _DROPPED:
            parts.append(token)
            self._closes = _OPAQUE.get(token, "")
        return match.end()


def _overlap(tail: str, mark: str) -> int:
    """Return how many characters at the end of `tail` begin the mark."""
    sizes = range(min(len(tail), len(mark) - 1), 0, -1)
    return next((size for size in sizes if tail.endswith(mark[:size])), 0)

"""Which tokens a message's log-probabilities belong to, however the output was cut."""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.text.detokenizer import IncrementalDetokenizer
from ...core.text.parsing import OutputParser
from ...core.text.tokenizer import Tokenizer
from ...core.types import CompletionOutput
from .logprobs import chat_logprobs
from .responses_events import Event, OutputItems


class _Pending(msgspec.Struct):
    """Text that no event has told yet, and the token that brought it."""

    text: str
    entry: Any
    """None once it is counted to a message."""


class MessageLogprobs:
    """Walks the answer a token at a time, with a parser and items of its own; a token belongs to
    the message in whose text its own appears."""

    def __init__(
        self, parser: OutputParser, tokenizer: Tokenizer, count: int, *, skip_special_tokens: bool
    ) -> None:
        """parser: a fresh one. count: how many rivals a token is shown with."""
        self._parser = parser
        self._tokenizer = tokenizer
        self._count = count
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens
        )
        self._items = OutputItems()
        self._pending: list[_Pending] = []
        self._entries: dict[int, list[Any]] = {}
        self._told: dict[int, int] = {}

    def push(self, completion: CompletionOutput) -> None:
        """The next tokens of the completion."""
        token_ids = completion.token_ids
        if completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str):
            token_ids = token_ids[:-1]  # The one that ended it has no text.
        for token, position in zip(token_ids, completion.logprobs or (), strict=False):
            (shown,) = chat_logprobs([position], self._count, self._tokenizer)["content"]
            text = self._detokenizer.push((token,))
            self._pending.append(_Pending(text, shown))
            self._walk(self._items.feed(self._parser.feed(text, (token,))))
        if completion.finish_reason is not None:
            text = self._detokenizer.finish()
            self._pending.append(_Pending(text, None))
            self._walk(self._items.feed(self._parser.feed(text) + self._parser.finish()))
            self._walk(self._items.close("completed"))

    def take(self, index: int, all: bool) -> list[Any]:
        """Entries of the message at this output index: those not told yet, or all."""
        entries = self._entries.get(index, [])
        first = 0 if all else self._told.get(index, 0)
        if not all:
            self._told[index] = len(entries)
        return entries[first:]

    def _walk(self, events: list[Event]) -> None:
        other = False
        for event in events:
            if event["type"] == "response.output_text.delta":
                self._count_to(event["output_index"], event["delta"])
                other = False
            elif event["type"].endswith(".delta"):
                other = True
        if other:
            self._pending = []

    def _count_to(self, index: int, text: str) -> None:
        """`text` was told: what stands before it were marks, what stands after it still waits."""
        waiting = "".join(one.text for one in self._pending)
        start = 0 if waiting.startswith(text) else max(waiting.rfind(text), 0)
        end = start + len(text)
        place, rest = 0, []
        for one in self._pending:
            begins, place = place, place + len(one.text)
            inside = start <= begins < end or begins < start < place
            if inside and one.entry is not None:
                self._entries.setdefault(index, []).append(one.entry)
            if begins >= end:
                rest.append(one)
            elif place > end:
                rest.append(_Pending(one.text[end - begins :], None))
        self._pending = rest

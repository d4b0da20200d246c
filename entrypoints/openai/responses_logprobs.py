"""Which tokens a message's log-probabilities belong to, however the output was cut."""

from __future__ import annotations

from typing import Any

from ...core.text.detokenizer import IncrementalDetokenizer
from ...core.text.parsing import OutputParser
from ...core.text.tokenizer import Tokenizer
from ...core.types import CompletionOutput
from .logprobs import chat_logprobs
from .responses_events import OutputItems


class MessageLogprobs:
    """Walks the answer a token at a time, with a parser and items of its own; a token belongs to
    the message whose text appears with it or after it."""

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
        self._undecided: list[Any] = []
        self._entries: dict[int, list[Any]] = {}
        self._told: dict[int, int] = {}

    def push(self, completion: CompletionOutput) -> None:
        """The next tokens of the completion."""
        token_ids = completion.token_ids
        if completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str):
            token_ids = token_ids[:-1]  # The one that ended it has no text.
        for token, position in zip(token_ids, completion.logprobs or (), strict=False):
            shown = chat_logprobs([position], self._count, self._tokenizer)["content"]
            self._undecided += shown
            self._walk(self._parser.feed(self._detokenizer.push((token,)), (token,)))
        if completion.finish_reason is not None:
            self._walk(self._parser.feed(self._detokenizer.finish()) + self._parser.finish())

    def take(self, index: int, all: bool) -> list[Any]:
        """Entries of the message at this output index: those not told yet, or all."""
        entries = self._entries.get(index, [])
        first = 0 if all else self._told.get(index, 0)
        if not all:
            self._told[index] = len(entries)
        return entries[first:]

    def _walk(self, parsed: Any) -> None:
        for event in self._items.feed(parsed):
            if event["type"] == "response.output_text.delta":
                self._entries.setdefault(event["output_index"], []).extend(self._undecided)
                self._undecided = []
            elif event["type"].endswith((".delta", ".output_item.added")):
                if event.get("item", {}).get("type") != "message":
                    self._undecided = []

"""Assigns tokens' log-probabilities to the messages with their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from ....core.output_parsing.completion_parser import TokenText
from ....core.outputs import CompletionOutput
from ....core.protocols.parsers import ParserEvent
from ....core.text.tokenizer import Tokenizer
from ...http.context import encoder
from ..common.logprobs import chat_logprobs
from .events import Event, OutputItems


class _Pending(msgspec.Struct):
    """Text in no event yet, with its token's entry."""

    text: str
    entry: Any
    """None once assigned to a message."""


class MessageLogprobs:
    """Builds output items token by token in parallel to the response's: a token belongs to the
    message with its text.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        """num_top: most likely tokens per entry."""
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._items = OutputItems()
        self._positions: deque[Any] = deque()
        """Log-probabilities of tokens whose text is pending."""
        self._in_token = False
        """Whether the last text was a token's beginning."""
        self._pending: list[_Pending] = []
        self._entries: dict[int, list[Any]] = {}
        """Output index of a message → its entries."""
        self._num_sent: dict[int, int] = {}

    def add(
        self, output: CompletionOutput, tokens: Sequence[tuple[TokenText, list[ParserEvent]]]
    ) -> None:
        """Add an output, with texts and events of its tokens."""
        self._positions.extend(output.logprobs or ())
        stopped = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        for token, events in tokens:
            entry = None
            if token.token_id is not None and not self._in_token and self._positions:
                position = self._positions.popleft()
                if token.text or self._positions or not stopped:  # A stop token has no text.
                    table = chat_logprobs([position], self._num_top, self._tokenizer)
                    # Encoded: a tenth of the memory, and it is sent up to five times.
                    entry = msgspec.Raw(encoder.encode(table["content"][0]))
            self._in_token = token.token_id is not None and not token.complete
            self._pending.append(_Pending(token.text, entry))
            self._assign(self._items.add(events))
        if output.finish_reason is not None:
            self._assign(self._items.close("completed"))

    def entries(self, index: int, *, only_new: bool) -> list[Any]:
        """Return the entries of the message at this output index: all, or those since the last
        call.
        """
        entries = self._entries.get(index, [])
        if not only_new:
            return entries[:]
        first, self._num_sent[index] = self._num_sent.get(index, 0), len(entries)
        return entries[first:]

    def _assign(self, events: list[Event]) -> None:
        is_other = False
        for event in events:
            if event["type"] == "response.output_text.delta":
                self._assign_text(event["output_index"], event["delta"])
                is_other = False
            elif event["type"].endswith(".delta"):
                is_other = True
        if is_other:
            self._pending = []

    def _assign_text(self, index: int, text: str) -> None:
        """Assign tokens to a message's text. Earlier pending text was marks; later text stays
        pending.
        """
        pending = "".join(part.text for part in self._pending)
        start = 0 if pending.startswith(text) else max(pending.rfind(text), 0)
        end = start + len(text)
        place, rest = 0, []
        for part in self._pending:
            begin, place = place, place + len(part.text)
            is_inside = start <= begin < end or begin < start < place
            if is_inside and part.entry is not None:
                self._entries.setdefault(index, []).append(part.entry)
            if begin >= end:
                rest.append(part)
            elif place > end:
                rest.append(_Pending(part.text[end - begin :], None))
        self._pending = rest

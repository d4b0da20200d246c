"""`CompletionParser`: feeds a completion's text to its parsers once, and counts its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from ..outputs import CompletionOutput
from ..protocols.parsers import ParserEvent
from .events import merge_events
from .output_parser import OutputParser


class TokenText(NamedTuple):
    """Text of a token, or part of it if the rest may be a stop string."""

    text: str
    token_id: int | None
    """None for text after the last token (an unfinished character)."""
    complete: bool
    """Whether no more text of the token follows."""


class TokenSplitter:
    """Splits a completion's text into its tokens' texts, over outputs in delta mode."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[int, int]] = deque()
        """(token id, end) of tokens with text to come."""
        self._num_chars = 0

    def split(self, output: CompletionOutput) -> Iterator[TokenText]:
        """Yield new text token by token; tokens without text have ""."""
        tokens, text, start = self._tokens, output.text, self._num_chars
        tokens.extend(zip(output.token_ids, output.token_ends, strict=False))
        self._num_chars += len(text)
        finished = output.finish_reason is not None
        position = 0
        while tokens:
            token_id, end = tokens[0]
            stop = min(end - start, len(text))
            complete = finished or end - start <= len(text)
            if complete:
                tokens.popleft()
            elif stop == position:
                break
            yield TokenText(text[position:stop], token_id, complete)
            position = stop
            if not complete:
                break
        if position < len(text):
            yield TokenText(text[position:], None, False)

    def pop_token_ids(self) -> list[int]:
        """Remove and return the tokens not completed by `split`."""
        token_ids = [token_id for token_id, _ in self._tokens]
        self._tokens.clear()
        return token_ids


class CompletionParser:
    """Parses one completion's outputs, in delta mode or a single final one.

    Feeds token by token until the reasoning ends, to count its tokens, then output by output.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._splitter = TokenSplitter()
        self.num_tokens = 0

    @property
    def plain(self) -> bool:
        return self._parser.plain

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning text, without its marks and adjacent space."""
        return self._parser.num_reasoning_tokens

    def count(self, output: CompletionOutput) -> None:
        self.num_tokens += len(output.token_ids)

    def feed(self, output: CompletionOutput) -> list[ParserEvent]:
        """Return an output's events. Raises RequestFailed if a parser fails."""
        self.count(output)
        parser = self._parser
        if parser.reasoning_ended:
            events = parser.feed(output.text, output.token_ids)
        else:
            events = self._feed_reasoning(output)
        if output.finish_reason is not None:
            events = events + parser.finish()
        return merge_events(events)

    def _feed_reasoning(self, output: CompletionOutput) -> list[ParserEvent]:
        events: list[ParserEvent] = []
        position = 0
        for token in self._splitter.split(output):
            events += self._feed_token(token)
            position += len(token.text)
            if self._parser.reasoning_ended:
                token_ids = self._splitter.pop_token_ids()
                if position < len(output.text):
                    events += self._parser.feed(output.text[position:], token_ids)
                break
        return events

    def feed_tokens(
        self, output: CompletionOutput
    ) -> Iterator[tuple[TokenText, list[ParserEvent]]]:
        """Yield each token's text and events; finally the held-back text.

        Replaces `feed` for all outputs of a completion. Raises RequestFailed if a parser fails.
        """
        self.count(output)
        for token in self._splitter.split(output):
            yield token, self._feed_token(token)
        if output.finish_reason is not None:
            yield TokenText("", None, False), self._parser.finish()

    def _feed_token(self, token: TokenText) -> list[ParserEvent]:
        token_ids = () if token.token_id is None else (token.token_id,)
        events = self._parser.feed(token.text, token_ids)
        if token.complete:
            self._parser.end_token()
        return events

"""Follows the thought of a completion by its token ids: how much it is, and where it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..protocols import Content, Reasoning, ReasoningParser
from .detokenizer import IncrementalDetokenizer
from .parsing import parser_failed
from .tokenizer import Tokenizer


class ReasoningTracker:
    """One a completion. Pushing tokens costs time linear in them, and next to none after the
    thought; fit for the event loop.
    """

    def __init__(
        self,
        parser: ReasoningParser,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        name: str = "the reasoning parser",
    ) -> None:
        """parser: a fresh one, this tracker's own; name: what errors call it."""
        self.num_tokens = 0
        """Tokens pushed."""
        self.num_reasoning_tokens = 0
        """How many of them are thought; those of its marks, and of space next to them, are not."""
        self.answer_start: int | None = 0 if parser.reasoning_ended else None
        """How many tokens of the completion come before the answer; None while it thinks, or has
        not shown yet whether it will. A grammar holds for the tokens from here on."""
        self._parser = parser
        self._name = name
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=False
        )
        self._thinking = False
        self._undecided = 0
        """Tokens after the last that was thought, which may be thought too or belong to a mark."""
        self._shown = self._answered = 0

    @property
    def ended(self) -> bool:
        """Whether the thought is over, or there is none."""
        return self.answer_start is not None

    def push(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the completion. Raises RequestFailed where the parser does."""
        for index, token in enumerate(token_ids):
            if self.answer_start is not None:
                self.num_tokens += len(token_ids) - index
                return
            self.num_tokens += 1
            self._one(token)

    def _one(self, token: int) -> None:
        text = self._detokenizer.push((token,))
        self._shown += len(text)
        try:
            events = self._parser.feed(text)
        except Exception as error:
            raise parser_failed(self._name) from error
        for event in events:
            self._thinking = isinstance(event, Reasoning)
            if isinstance(event, Content):
                self._answered += len(event.text)
        if self._parser.reasoning_ended:
            # Text that was answer from its beginning on: there was no mark, and no thought.
            self.answer_start = 0 if 0 < self._answered == self._shown else self.num_tokens
        elif not self._thinking:
            self._undecided = 0
        elif events:
            self.num_reasoning_tokens += self._undecided + 1
            self._undecided = 0
        else:
            self._undecided += 1


def make_parser(
    parser: type[ReasoningParser], *, thinking: bool, prompt_end: str = ""
) -> ReasoningParser:
    """A parser for one output, which follows a prompt that ends like this ("": it is not known)."""
    made = parser(thinking=thinking)
    see_prompt_end = getattr(made, "see_prompt_end", None)
    if prompt_end and see_prompt_end is not None:
        see_prompt_end(prompt_end)
    return made


def lets_think(parser: type[ReasoningParser], chat_template_kwargs: Mapping[str, Any]) -> bool:
    """Whether a request with these template arguments thinks: `thinking` for the parser."""
    switch, default = getattr(parser, "thinking_switch", ("enable_thinking", True))
    return bool(chat_template_kwargs.get(switch, default))

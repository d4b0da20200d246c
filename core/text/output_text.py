"""The text of one completion: detokenized, cut at stop strings, shown only as far as certain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..types import FinishReason, SamplingParams
from .detokenizer import IncrementalDetokenizer
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class StopMatch:
    """A stop string was completed."""

    string: str


class OutputText:
    """Grows token by token.

    `text` is what may be shown: a tail that could still become a stop string is held back.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._stops = params.stop
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._shown: list[str] = []
        self._taken = 0
        self._held = ""
        self._guarded = 0
        """Leading characters of `_held` that belong to the first min_tokens tokens."""
        self._done = False

    @property
    def text(self) -> str:
        """All that may be shown."""
        if len(self._shown) > 1:
            joined = "".join(self._shown)
            self._shown, self._taken = [joined], self._taken
        return self._shown[0] if self._shown else ""

    def take_delta(self) -> str:
        """What may be shown and was not taken yet."""
        text = self.text
        delta = text[self._taken :]
        self._taken = len(text)
        return delta

    def push(self, token_ids: Sequence[int], num_output_tokens: int) -> StopMatch | None:
        """New tokens, `num_output_tokens` in all; → the stop string they complete."""
        if self._done:
            return None
        return self._add(self._detokenizer.push(token_ids), num_output_tokens)

    def finish(self, reason: FinishReason) -> None:
        """Show what was held back."""
        if self._done:
            return
        self._add(self._detokenizer.finish(), 0)
        if not self._done:
            self._show(self._held)
            self._done = True

    def _add(self, new: str, num_output_tokens: int) -> StopMatch | None:
        if not new:
            return None
        if not self._stops:
            self._show(new)
            return None
        self._held += new
        if 0 < num_output_tokens <= self._min_tokens:
            self._guarded = len(self._held)
        match = self._find() if num_output_tokens else None
        if match is not None:
            position, stop = match
            self._show(self._held[: position + len(stop) if self._include else position])
            self._done = True
            return StopMatch(stop)
        keep = self._possible_start()
        safe = len(self._held) - keep
        self._show(self._held[:safe])
        self._held = self._held[safe:]
        self._guarded = max(0, self._guarded - safe)
        return None

    def _find(self) -> tuple[int, str] | None:
        """The match that ends first, after the guarded part; of those, the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            position = self._held.find(stop, max(0, self._guarded - len(stop) + 1))
            if position >= 0:
                found = (position + len(stop), position, stop)
                best = min(best, found) if best else found
        return (best[1], best[2]) if best else None

    def _possible_start(self) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)

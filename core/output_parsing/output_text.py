"""`OutputText`: one completion's text, where each token ends in it, and where a stop string ends
it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..outputs import FinishReason
from ..sampling_params import SamplingParams
from ..text.detokenizer import IncrementalDetokenizer
from ..text.tokenizer import Tokenizer
from .stop_strings import stop_strings


class StopMatch(msgspec.Struct, frozen=True):
    stop: str
    token_index: int
    """Pushed token that completed it; later ones are not output."""


class OutputText:
    """Accumulates the text of one completion.

    The stop string completed first ends the text; of several at the same character, the longest.
    How the text is split into tokens does not matter. A tail that may become a stop string is held
    back.

    Push output tokens only: stop tokens (EOS, a stop id) are not text, except with
    `include_stop_str_in_output`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        """tokenizer: None: the text stays empty."""
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._automaton = stop_strings(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._state = 0
        self._pending_text = ""
        self._parts: list[str] = []
        self._taken = 0
        self._ended = False
        self._num_chars = 0
        self.token_ends: list[int] = []
        """[num_tokens] End of each token's text in characters; incomplete characters count for the
        completing token. Exceeds `len(text)` for held-back text or a removed stop string."""

    @property
    def text(self) -> str:
        if len(self._parts) > 1:
            joined = "".join(self._parts)
            if self._taken:
                start = sum(map(len, self._parts[: self._taken]))
                self._parts = [joined[:start], joined[start:]]
                self._taken = 1
                return joined
            self._parts = [joined]
        return self._parts[0] if self._parts else ""

    def push(self, token_ids: Sequence[int], num_output_tokens: int) -> StopMatch | None:
        """Add output tokens; ignored after a match.

        num_output_tokens: including these. Stop strings that end within the first `min_tokens` do
        not count.
        """
        if self._detokenizer is None or self._ended:
            return None
        before = num_output_tokens - len(token_ids)
        for index, token in enumerate(token_ids):
            stop = self.push_token(token, before + index + 1)
            if stop is not None:
                return StopMatch(stop, index)
        return None

    def push_token(self, token_id: int, num_output_tokens: int) -> str | None:
        """As `push`, for one token. Return the stop string that it completes."""
        if self._detokenizer is None or self._ended:
            return None
        delta = self._detokenizer.push_token(token_id)
        self._num_chars += len(delta)
        self.token_ends.append(self._num_chars)
        if self._automaton is not None:
            return self._scan(delta, num_output_tokens > self._min_tokens)
        if delta:
            self._parts.append(delta)
        return None

    def push_stop_token(self) -> None:
        self.token_ends.append(self._num_chars)

    def finish(self, reason: FinishReason | None = None) -> None:
        """End the output, showing held-back text. May be called twice, and after a match."""
        if self._detokenizer is None or self._ended:
            return
        rest = self._detokenizer.finish()
        if self._automaton is None:
            self._show(rest)
        elif self._scan(rest, counts=True) is None:
            self._show(self._pending_text)
            self._pending_text = ""
        self._ended = True

    def take_delta(self) -> str:
        parts, start = self._parts, self._taken
        self._taken = len(parts)
        return parts[-1] if self._taken == start + 1 else "".join(parts[start:])

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(text)

    def _scan(self, delta: str, counts: bool) -> str | None:
        """Run new text through the automaton; return a completed stop string."""
        automaton = self._automaton
        assert automaton is not None
        state = self._state
        if state == 0 and automaton.first.search(delta) is None:
            self._show(delta)
            return None
        for position, char in enumerate(delta):
            state = automaton.step(state, char)
            stop = automaton.matched[state]
            if stop is not None and counts:
                text = self._pending_text + delta[: position + 1]
                self._show(text if self._include_stop else text[: len(text) - len(stop)])
                self._pending_text = ""
                self._ended = True
                return stop
        self._state = state
        text = self._pending_text + delta
        safe = len(text) - automaton.pending[state]
        self._show(text[:safe])
        self._pending_text = text[safe:]
        return None

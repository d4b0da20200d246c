"""Finds stop strings in text that arrives in pieces, character by character, in linear time."""

from __future__ import annotations

import functools
import re


class StopStrings:
    """An immutable Aho-Corasick automaton, shared between requests.

    A state is how much of some string the text ends with; 0 is the start.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        depth = [0]
        ends: list[str | None] = [None]
        for string in strings:
            state = 0
            for char in string:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    depth.append(depth[state] + 1)
                    ends.append(None)
                state = self._next[state][char]
            ends[state] = string
        self.first = re.compile("|".join(map(re.escape, self._next[0])) or "(?!)")
        """Matches a first character of some string: without one, state 0 stays."""
        self._fail = [0] * len(depth)
        order = list(self._next[0].values())
        for state in order:
            for char, child in self._next[state].items():
                order.append(child)
                self._fail[child] = self.step(self._fail[state], char)
        self.matched: list[str | None] = ends
        """[num_states] The longest string that ends in this state."""
        self.pending: list[int] = depth
        """[num_states] Characters at the end that may become part of a match."""
        for state in order:
            if ends[state] is None:
                ends[state] = ends[self._fail[state]]
            if not self._next[state]:
                depth[state] = depth[self._fail[state]]

    def step(self, state: int, char: str) -> int:
        following = self._next
        while True:
            next_state = following[state].get(char)
            if next_state is not None:
                return next_state
            if state == 0:
                return 0
            state = self._fail[state]


@functools.lru_cache(maxsize=256)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings)

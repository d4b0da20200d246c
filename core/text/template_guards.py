"""`RenderingGuards`: what becomes of each text that a rendering gets."""

from __future__ import annotations

from collections.abc import Callable

from .chat_messages import Guard, Message, same


class RenderingGuards:
    """Guards and counts one rendering's texts, and remembers typed control tokens."""

    def __init__(
        self,
        guard: Guard = same,
        assistant: Guard = same,
        searched: Guard = same,
        check_characters: Callable[[int], None] | None = None,
    ) -> None:
        """assistant: for the assistant's messages. searched: for those with reasoning in the
        content, where the template searches.
        """
        self.guard = self._checked(guard)
        self._assistant = self._checked(assistant)
        self._searched = self._checked(searched)
        self._check_characters = check_characters
        self.broken = False
        """Whether a guard changed a text."""
        self.num_characters = 0

    def of(self, message: Message) -> Guard:
        if message["role"] != "assistant":
            return self.guard
        return self._assistant if message.get("reasoning_content") else self._searched

    def _checked(self, guard: Guard) -> Guard:
        def checked(text: str) -> str:
            self.num_characters += len(text)
            if self._check_characters is not None:
                self._check_characters(self.num_characters)
            marked = guard(text)
            self.broken = self.broken or marked is not text
            return marked

        return checked

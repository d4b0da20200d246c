"""Thought between `[[thinking]]` and `[[/thinking]]`, at the beginning of an answer."""

from __future__ import annotations

from jackfield.plugins.parsing.tagged_reasoning import TaggedReasoningParser


class BracketsReasoningParser(TaggedReasoningParser):
    """The model thinks when it likes: text that begins without the mark is the answer."""

    open = ("[[thinking]]",)
    close = ("[[/thinking]]",)
    begins_inside = False
    markers = (*open, *close)

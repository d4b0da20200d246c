"""The old place of `TaggedReasoningParser`."""

from __future__ import annotations

from ...core.old_names import module_getattr

__getattr__ = module_getattr(
    __name__,
    {"ThoughtParser": "jackfield.plugins.parsing.tagged_reasoning.TaggedReasoningParser"},
)

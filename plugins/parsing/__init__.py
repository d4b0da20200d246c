"""Mechanisms from which parsers of model output are declared, also for outside plugins.

A parser is a generator that reads its text through a `Cursor` and waits where it cannot decide yet.
What a `Cursor` returns depends only on the text, not on how it was split into pieces, and the end
of the text is read like other input.
"""

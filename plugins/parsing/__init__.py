"""Machines that parsers of model output are declared from; outsiders may use them too.

A parser is a generator that reads its text through a `Cursor` and waits where it cannot decide yet.
What a `Cursor` answers depends on the text alone, never on how it was cut, and the end of the text
is one more thing to read. So every cutting gives the same fold, and no parser has a second,
streaming twin.
"""

"""Grammars of tool calls, in the form in which a model family writes them."""

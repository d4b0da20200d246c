"""Grammars of tool calls, from how a model family writes them."""

"""Outputs held to grammars: checking, compiling and walking them. No torch."""

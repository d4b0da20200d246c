"""Constrained outputs: validating, compiling and following grammars. No torch."""

"""Compiles grammars in a process that may be killed."""

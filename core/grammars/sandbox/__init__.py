"""Test-compiles grammars in separate processes, which can be killed."""

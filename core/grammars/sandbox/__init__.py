"""Test-compiles grammars in killable processes."""

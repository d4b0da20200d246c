"""Registered names of plugins: their references, options, and checks before use."""

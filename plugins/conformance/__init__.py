"""Kits of pytest tests that tell whether a plugin keeps its contract: one module a protocol."""

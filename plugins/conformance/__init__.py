"""Conformance kits: what a plugin must pass, as classes of pytest tests."""

"""Helpers, where vLLM has them."""

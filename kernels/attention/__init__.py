"""Attention over a paged KV cache, and what prepares queries, keys and values."""

"""Block pool, prefix index, KV manager: pure Python, no torch."""

"""AsyncEngine: the pipelined step loop and per-request output streams."""

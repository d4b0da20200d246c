"""Data parallelism: several engines with one model, each in its own processes."""

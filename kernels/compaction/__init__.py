"""Kernels of KV compression: scores of cached tokens, the choice of those that stay, their move."""

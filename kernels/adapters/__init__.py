"""Kernels of adapters: a step's tokens by adapter, and what adapters add to a product."""

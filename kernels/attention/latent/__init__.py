"""Attention over latents: their cache, decode rows, prompts, and the products around them."""

"""Layers that cache a latent of each token in place of keys and values."""

"""Sampling: from logits to token ids."""

"""Checkpoints: configuration, tensors, weight-name mapping."""

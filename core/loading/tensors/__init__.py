"""Checkpoint tensors of other forms, or of quantized layers."""

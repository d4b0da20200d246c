"""Checkpoint tensors that are not copied as they are: of other forms, or of quantized layers."""

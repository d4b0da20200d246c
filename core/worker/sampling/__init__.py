"""Sampling on the device: the sampler, its state per slot, masks, logits processors."""

"""Adapters (LoRA): many small changes of one base model."""

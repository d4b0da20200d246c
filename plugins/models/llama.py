"""Llama 2 and 3, and everything published under LlamaForCausalLM."""

from __future__ import annotations

from .decoder import CausalLM


class LlamaForCausalLM(CausalLM):
    """Biases, head size and rope variant come from the configuration."""

"""Every architecture in the box passes the kit."""

from __future__ import annotations

from jackfield.plugins.conformance.models import ModelKit


class TestLlama(ModelKit):
    name = "LlamaForCausalLM"
    config = {"tie_word_embeddings": False}


class TestMistral(ModelKit):
    name = "MistralForCausalLM"
    config = {"sliding_window": 24}


class TestQwen2(ModelKit):
    name = "Qwen2ForCausalLM"
    config = {"tie_word_embeddings": True}


class TestQwen3(ModelKit):
    name = "Qwen3ForCausalLM"
    config = {"head_dim": 32, "tie_word_embeddings": True}

"""Model architectures that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl

POOLED = {
    "glm4": {
        "Glm4Model": "Glm4Model",
        "Glm4ForSequenceClassification": "Glm4ForSequenceClassification",
    },
    "granite": {"GraniteModel": "GraniteModel"},
    "llama": {
        "LlamaModel": "LlamaModel",
        "LlamaForSequenceClassification": "LlamaForSequenceClassification",
    },
    "mistral": {
        "MistralModel": "MistralModel",
        "MistralForSequenceClassification": "MistralForSequenceClassification",
    },
    "olmo2": {
        "Olmo2Model": "Olmo2Model",
        "Olmo2ForSequenceClassification": "Olmo2ForSequenceClassification",
    },
    "olmo3": {
        "Olmo3Model": "Olmo3Model",
        "Olmo3ForSequenceClassification": "Olmo3ForSequenceClassification",
    },
    "phi3": {
        "Phi3Model": "Phi3Model",
        "Phi3ForSequenceClassification": "Phi3ForSequenceClassification",
    },
    "qwen2": {
        "Qwen2Model": "Qwen2Model",
        "Qwen2ForSequenceClassification": "Qwen2ForSequenceClassification",
    },
    "qwen3": {
        "Qwen3Model": "Qwen3Model",
        "Qwen3ForSequenceClassification": "Qwen3ForSequenceClassification",
    },
    "gemma": {
        "GemmaModel": "GemmaModel",
        "GemmaForSequenceClassification": "GemmaForSequenceClassification",
    },
    "gemma2": {
        "Gemma2Model": "Gemma2Model",
        "Gemma2ForSequenceClassification": "Gemma2ForSequenceClassification",
    },
    "gemma3": {
        "Gemma3TextModel": "Gemma3TextModel",
        "Gemma3TextForSequenceClassification": "Gemma3TextForSequenceClassification",
    },
    "bert": {
        "BertModel": "BertModel",
        "BertForMaskedLM": "BertModel",
        "BertForSequenceClassification": "BertForSequenceClassification",
    },
    "roberta": {
        "RobertaModel": "RobertaModel",
        "RobertaForMaskedLM": "RobertaModel",
        "RobertaForSequenceClassification": "RobertaForSequenceClassification",
        "XLMRobertaModel": "RobertaModel",
        "XLMRobertaForMaskedLM": "RobertaModel",
        "XLMRobertaForSequenceClassification": "RobertaForSequenceClassification",
    },
}
"""Module → architectures of vectors or labels. Of a masked model only the encoder is used."""


@hookimpl
def register_models(registry: Any) -> None:
    registry.add("Glm4ForCausalLM", "jackfield.plugins.models.glm4:Glm4ForCausalLM")
    registry.add("GptOssForCausalLM", "jackfield.plugins.models.gpt_oss:GptOssForCausalLM")
    registry.add("GraniteForCausalLM", "jackfield.plugins.models.granite:GraniteForCausalLM")
    registry.add("LlamaForCausalLM", "jackfield.plugins.models.llama:LlamaForCausalLM")
    registry.add("MistralForCausalLM", "jackfield.plugins.models.mistral:MistralForCausalLM")
    registry.add("Olmo2ForCausalLM", "jackfield.plugins.models.olmo2:Olmo2ForCausalLM")
    registry.add("Olmo3ForCausalLM", "jackfield.plugins.models.olmo3:Olmo3ForCausalLM")
    registry.add("Phi3ForCausalLM", "jackfield.plugins.models.phi3:Phi3ForCausalLM")
    registry.add("Qwen2ForCausalLM", "jackfield.plugins.models.qwen2:Qwen2ForCausalLM")
    registry.add("Qwen3ForCausalLM", "jackfield.plugins.models.qwen3:Qwen3ForCausalLM")
    registry.add("Qwen3MoeForCausalLM", "jackfield.plugins.models.qwen3_moe:Qwen3MoeForCausalLM")
    registry.add("GemmaForCausalLM", "jackfield.plugins.models.gemma:GemmaForCausalLM")
    registry.add("Gemma2ForCausalLM", "jackfield.plugins.models.gemma2:Gemma2ForCausalLM")
    registry.add("Gemma3ForCausalLM", "jackfield.plugins.models.gemma3:Gemma3ForCausalLM")
    registry.add("MixtralForCausalLM", "jackfield.plugins.models.mixtral:MixtralForCausalLM")
    for module, names in POOLED.items():
        for name, attribute in names.items():
            registry.add(name, f"jackfield.plugins.models.{module}:{attribute}")

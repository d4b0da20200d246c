"""Model architectures that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl


@hookimpl
def register_models(registry: Any) -> None:
    registry.add("LlamaForCausalLM", "jackfield.plugins.models.llama:LlamaForCausalLM")
    registry.add("MistralForCausalLM", "jackfield.plugins.models.mistral:MistralForCausalLM")
    registry.add("Qwen2ForCausalLM", "jackfield.plugins.models.qwen2:Qwen2ForCausalLM")
    registry.add("Qwen3ForCausalLM", "jackfield.plugins.models.qwen3:Qwen3ForCausalLM")
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        for kind in ("Model", "ForSequenceClassification"):
            name = f"{family}{kind}"
            registry.add(name, f"jackfield.plugins.models.{family.lower()}:{name}")
    for kind in ("Model", "ForSequenceClassification"):
        registry.add(f"Bert{kind}", f"jackfield.plugins.models.bert:Bert{kind}")
        for family in ("Roberta", "XLMRoberta"):
            registry.add(f"{family}{kind}", f"jackfield.plugins.models.roberta:Roberta{kind}")

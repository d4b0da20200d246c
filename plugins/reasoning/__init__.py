"""Reasoning parsers that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl

_HERE = "jackfield.plugins.reasoning"


@hookimpl
def register_reasoning_parsers(registry: Any) -> None:
    registry.add("deepseek_r1", f"{_HERE}.think_tags:DeepSeekR1Reasoning")
    registry.add("deepseek_v3", f"{_HERE}.think_tags:DeepSeekV3Reasoning")
    registry.add("glm45", f"{_HERE}.think_tags:Glm45Reasoning")
    registry.add("gptoss", f"{_HERE}.harmony:HarmonyReasoning")
    registry.add("granite", f"{_HERE}.think_tags:GraniteReasoning")
    registry.add("hunyuan_a13b", f"{_HERE}.think_tags:HunyuanA13bReasoning")
    registry.add("identity", f"{_HERE}.think_tags:IdentityReasoning")
    registry.add("minimax_m2", f"{_HERE}.think_tags:MiniMaxM2Reasoning")
    registry.add("minimax_m2_append_think", f"{_HERE}.think_tags:MiniMaxM2AppendThinkReasoning")
    registry.add("mistral", f"{_HERE}.think_tags:MistralReasoning")
    registry.add("olmo3", f"{_HERE}.think_tags:Olmo3Reasoning")
    registry.add("openai_gptoss", f"{_HERE}.harmony:HarmonyReasoning")
    registry.add("qwen3", f"{_HERE}.think_tags:Qwen3Reasoning")
    registry.add("step3", f"{_HERE}.think_tags:Step3Reasoning")
    registry.add("think_tags", f"{_HERE}.think_tags:ThinkTagsReasoning")

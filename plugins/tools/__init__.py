"""Tool-call parsers that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl

_HERE = "jackfield.plugins.tools"


@hookimpl
def register_tool_parsers(registry: Any) -> None:
    registry.add("deepseek_v3", f"{_HERE}.named_families:DeepSeekV3ToolParser")
    registry.add("deepseek_v31", f"{_HERE}.named_families:DeepSeekV31ToolParser")
    registry.add("glm45", f"{_HERE}.tagged_families:Glm45ToolParser")
    registry.add("granite", f"{_HERE}.json_families:GraniteToolParser")
    registry.add("granite-20b-fc", f"{_HERE}.json_families:Granite20bFcToolParser")
    registry.add("hermes", f"{_HERE}.hermes:HermesToolParser")
    registry.add("hunyuan_a13b", f"{_HERE}.json_families:HunyuanA13bToolParser")
    registry.add("internlm", f"{_HERE}.json_families:InternLmToolParser")
    registry.add("jamba", f"{_HERE}.json_families:JambaToolParser")
    registry.add("kimi_k2", f"{_HERE}.named_families:KimiK2ToolParser")
    registry.add("llama3_json", f"{_HERE}.json_families:Llama3JsonToolParser")
    registry.add("llama4_json", f"{_HERE}.json_families:Llama3JsonToolParser")
    registry.add("llama4_pythonic", f"{_HERE}.python_families:Llama4PythonicToolParser")
    registry.add("minimax", f"{_HERE}.json_families:MiniMaxToolParser")
    registry.add("minimax_m2", f"{_HERE}.tagged_families:MiniMaxM2ToolParser")
    registry.add("mistral", f"{_HERE}.named_families:MistralToolParser")
    registry.add("olmo3", f"{_HERE}.python_families:Olmo3ToolParser")
    registry.add("openai", f"{_HERE}.harmony:HarmonyToolParser")
    registry.add("phi4_mini_json", f"{_HERE}.json_families:Phi4MiniJsonToolParser")
    registry.add("pythonic", f"{_HERE}.python_families:PythonicToolParser")
    registry.add("qwen3_coder", f"{_HERE}.tagged_families:Qwen3CoderToolParser")
    registry.add("qwen3_xml", f"{_HERE}.tagged_families:Qwen3CoderToolParser")
    registry.add("seed_oss", f"{_HERE}.tagged_families:SeedOssToolParser")
    registry.add("step3", f"{_HERE}.tagged_families:Step3ToolParser")
    registry.add("xlam", f"{_HERE}.json_families:XlamToolParser")

"""Tool-call parsers that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl

_HERE = "jackfield.plugins.tools"


@hookimpl
def register_tool_parsers(registry: Any) -> None:
    registry.add("deepseek_v3", f"{_HERE}.named_families:DeepSeekV3ToolParser")
    registry.add("deepseek_v31", f"{_HERE}.named_families:DeepSeekV31ToolParser")
    registry.add("granite", f"{_HERE}.json_families:GraniteToolParser")
    registry.add("hermes", f"{_HERE}.hermes:HermesToolParser")
    registry.add("hunyuan_a13b", f"{_HERE}.json_families:HunyuanA13bToolParser")
    registry.add("internlm", f"{_HERE}.json_families:InternLmToolParser")
    registry.add("jamba", f"{_HERE}.json_families:JambaToolParser")
    registry.add("kimi_k2", f"{_HERE}.named_families:KimiK2ToolParser")
    registry.add("llama3_json", f"{_HERE}.json_families:Llama3JsonToolParser")
    registry.add("minimax", f"{_HERE}.json_families:MiniMaxToolParser")
    registry.add("mistral", f"{_HERE}.named_families:MistralToolParser")
    registry.add("phi4_mini_json", f"{_HERE}.json_families:Phi4MiniJsonToolParser")
    registry.add("xlam", f"{_HERE}.json_families:XlamToolParser")

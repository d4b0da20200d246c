"""The tool-call parsers that come with Jackfield."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl

_HERE = "jackfield.plugins.tools"
_PARSERS = {
    "apertus": ("json_families:ApertusToolParser", "Apertus"),
    "apertus2509": ("json_families:ApertusToolParser", "Apertus 2509"),
    "cohere_command3": ("json_families:CohereToolParser", "Command A"),
    "cohere_command4": ("json_families:CohereToolParser", "Cohere's models after Command A"),
    "deepseek_v3": ("named_families:DeepSeekV3ToolParser", "DeepSeek-V3-0324, DeepSeek-R1-0528"),
    "deepseek_v31": ("named_families:DeepSeekV31ToolParser", "DeepSeek-V3.1"),
    "deepseek_v32": ("dsml_families:DeepSeekV32ToolParser", "DeepSeek-V3.2"),
    "deepseek_v4": ("dsml_families:DeepSeekV4ToolParser", "DeepSeek-V4"),
    "deepseek_v41": ("dsml_families:DeepSeekV41ToolParser", "DeepSeek-V4.1"),
    "ernie45": ("hermes:HermesToolParser", "ERNIE 4.5 Thinking"),
    "functiongemma": ("object_families:FunctionGemmaToolParser", "FunctionGemma"),
    "gemma4": ("object_families:Gemma4ToolParser", "Gemma 4"),
    "gigachat3": ("json_families:GigaChat3ToolParser", "GigaChat 3"),
    "gigachat35": ("dsml_families:GigaChat35ToolParser", "GigaChat 3.5"),
    "glm45": ("tagged_families:Glm45ToolParser", "GLM-4.5, GLM-4.6"),
    "glm47": ("tagged_families:Glm47ToolParser", "GLM-4.7, GLM-5"),
    "granite": ("json_families:GraniteToolParser", "Granite 3"),
    "granite-20b-fc": ("json_families:Granite20bFcToolParser", "Granite 20B Function Calling"),
    "granite4": ("hermes:HermesToolParser", "Granite 4.0"),
    "hermes": ("hermes:HermesToolParser", "Hermes 2 Pro, Hermes 3, Qwen2.5, Qwen3, QwQ"),
    "hunyuan_a13b": ("json_families:HunyuanA13bToolParser", "Hunyuan-A13B"),
    "hy_v3": ("tagged_families:Hy3ToolParser", "Hunyuan 3"),
    "hy_v4": ("tagged_families:Hy4ToolParser", "Hunyuan 4"),
    "internlm": ("json_families:InternLmToolParser", "InternLM2.5"),
    "jamba": ("json_families:JambaToolParser", "Jamba 1.5"),
    "kimi_k2": ("named_families:KimiK2ToolParser", "Kimi K2"),
    "kimi_k3": ("kimi_k3:KimiK3ToolParser", "Kimi K3"),
    "lfm2": ("python_families:Lfm2ToolParser", "LFM2, LFM2.5"),
    "ling3": ("tagged_families:Glm47ToolParser", "Ling 3"),
    "llama3_json": ("json_families:Llama3JsonToolParser", "Llama 3.1, Llama 3.2"),
    "llama4_json": ("json_families:Llama3JsonToolParser", "Llama 4"),
    "llama4_pythonic": ("python_families:Llama4PythonicToolParser", "Llama 4"),
    "longcat": ("hermes:LongCatToolParser", "LongCat-Flash"),
    "mimo": ("tagged_families:MiMoToolParser", "MiMo-V2"),
    "minimax": ("json_families:MiniMaxToolParser", "MiniMax-M1"),
    "minimax_m2": ("tagged_families:MiniMaxM2ToolParser", "MiniMax-M2"),
    "mistral": ("named_families:MistralToolParser", "Mistral 7B v0.3 and later, Magistral"),
    "olmo3": ("python_families:Olmo3ToolParser", "OLMo 3"),
    "openai": ("harmony:HarmonyToolParser", "gpt-oss"),
    "phi4_mini_json": ("json_families:Phi4MiniJsonToolParser", "Phi-4-mini"),
    "plamo3": ("named_families:Plamo3ToolParser", "PLaMo 3"),
    "poolside_v1": ("tagged_families:PoolsideToolParser", "Laguna"),
    "pythonic": ("python_families:PythonicToolParser", "Llama 3.2, ToolACE"),
    "qwen3_coder": ("tagged_families:Qwen3CoderToolParser", "Qwen3-Coder"),
    "qwen3_json": ("hermes:HermesToolParser", "Qwen3"),
    "qwen3_xml": ("tagged_families:Qwen3CoderToolParser", "Qwen3-Coder"),
    "seed_oss": ("tagged_families:SeedOssToolParser", "Seed-OSS"),
    "step3": ("tagged_families:Step3ToolParser", "Step-3"),
    "step3p5": ("tagged_families:Qwen3CoderToolParser", "Step-3.5"),
    "step5": ("tagged_families:Qwen3CoderToolParser", "Step-5"),
    "trinity": ("hermes:TrinityToolParser", "Trinity"),
    "xlam": ("json_families:XlamToolParser", "xLAM 2"),
}
"""name → (module and class, model family)"""
_MARKS = {
    "apertus": ("<|tools_prefix|>",),
    "cohere_command3": ("<|START_ACTION|>", "<|START_RESPONSE|>"),
    "cohere_command4": ("<|START_ACTION|>", "<|START_TEXT|>"),
    "deepseek_v3": ("<｜tool▁call▁begin｜>", "```json"),
    "deepseek_v31": ("<｜tool▁call▁begin｜>",),
    "deepseek_v32": ("<｜DSML｜function_calls>",),
    "deepseek_v4": ("<｜DSML｜tool_calls>",),
    "deepseek_v41": ("<｜DSML｜ calls>",),
    "ernie45": ("<tool_call>",),
    "functiongemma": ("<start_function_call>", "<escape>"),
    "gemma4": ("<|tool_call>", '<|"|>'),
    "gigachat3": ("function call<|role_sep|>",),
    "gigachat35": ("<｜GCML｜tool_calls>",),
    "glm45": ("<tool_call>", "<arg_key>"),
    "glm47": ("<tool_call>{function-name}<arg_key>",),
    "granite": ("<|tool_call|>",),
    "granite4": ("<tool_call>",),
    "hermes": ("<tool_call>",),
    "hunyuan_a13b": ("<tool_calls>",),
    "internlm": ("<|action_start|>",),
    "jamba": ("<tool_calls>",),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    "lfm2": ("<|tool_call_start|>",),
    "llama3_json": ("<|python_tag|>",),
    "llama4_pythonic": ("<|python_start|>",),
    "longcat": ("<longcat_tool_call>",),
    "mimo": ("<tool_call>", "<function="),
    "minimax_m2": ("<minimax:tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "olmo3": ("<function_calls>",),
    "openai": ("<|channel|>", "<|message|>"),
    "phi4_mini_json": ("<|tool_call|>",),
    "qwen3_coder": ("<tool_call>", "<function="),
    "seed_oss": ("<seed:tool_call>",),
    "step3": ("<steptml:invoke",),
}
"""name → what `auto` knows a model's chat template by"""
_MODEL_TYPES = {
    "ernie45": ("ernie4_5", "ernie4_5_moe"),
    "granite": ("granite", "granitemoe", "granitemoehybrid", "granitemoeshared"),
    "granite4": ("granite", "granitemoe", "granitemoehybrid", "granitemoeshared"),
    "hunyuan_a13b": ("hunyuan", "hunyuan_v1_moe"),
    "jamba": ("jamba",),
    "mimo": ("mimo_v2", "mimo_v2_flash"),
    "olmo3": ("olmo3",),
    "phi4_mini_json": ("phi3",),
}
"""name → model types that share those marks with no others"""


@hookimpl
def register_tool_parsers(registry: Any) -> None:
    for name, (place, models) in _PARSERS.items():
        registry.add(
            name, f"{_HERE}.{place}", help=models, marks=_MARKS.get(name, ()),
            model_types=_MODEL_TYPES.get(name, ()),
        )  # fmt: skip

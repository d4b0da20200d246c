"""The tool-call parsers that come with Jackfield."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl
from ..parsing.dialect import Dialect

_HERE = "jackfield.plugins.tools"
_PARSERS: dict[str, Dialect] = {
    "apertus": Dialect("json_families:ApertusToolParser", "Apertus", marks=("<|tools_prefix|>",)),
    "apertus2509": Dialect("json_families:ApertusToolParser", "Apertus 2509"),
    "beam": Dialect(
        "harmony:BeamToolParser",
        "Beam",
        marks=("<|channel|>", "<|constrain|>xml", "<rfl:parameter"),
    ),
    "cohere_command3": Dialect(
        "json_families:CohereToolParser",
        "Command A",
        marks=("<|START_ACTION|>", "<|START_RESPONSE|>"),
    ),
    "cohere_command4": Dialect(
        "json_families:CohereToolParser",
        "Cohere's models after Command A",
        marks=("<|START_ACTION|>", "<|START_TEXT|>"),
    ),
    "deepseek_v3": Dialect(
        "named_families:DeepSeekV3ToolParser",
        "DeepSeek-V3-0324, DeepSeek-R1-0528",
        marks=("<｜tool▁call▁begin｜>", "```json"),
        aliases=("deepseekv3",),
    ),
    "deepseek_v31": Dialect(
        "named_families:DeepSeekV31ToolParser",
        "DeepSeek-V3.1",
        marks=("<｜tool▁call▁begin｜>",),
        aliases=("deepseekv31",),
    ),
    "deepseek_v32": Dialect(
        "dsml_families:DeepSeekV32ToolParser",
        "DeepSeek-V3.2",
        marks=("<｜DSML｜function_calls>",),
        aliases=("deepseekv32",),
    ),
    "deepseek_v4": Dialect(
        "dsml_families:DeepSeekV4ToolParser",
        "DeepSeek-V4",
        marks=("<｜DSML｜tool_calls>",),
        aliases=("deepseekv4",),
    ),
    "deepseek_v41": Dialect(
        "dsml_families:DeepSeekV41ToolParser",
        "DeepSeek-V4.1",
        marks=("<｜DSML｜ calls>",),
        aliases=("deepseekv41",),
    ),
    "dots": Dialect("block_families:DotsToolParser", "dots", marks=("<dots_function_call>",)),
    "ernie45": Dialect(
        "hermes:HermesToolParser",
        "ERNIE 4.5 Thinking",
        marks=("<tool_call>",),
        model_types=("ernie4_5", "ernie4_5_moe"),
    ),
    "functiongemma": Dialect(
        "object_families:FunctionGemmaToolParser",
        "FunctionGemma",
        marks=("<start_function_call>", "<escape>"),
    ),
    "gemma4": Dialect(
        "object_families:Gemma4ToolParser", "Gemma 4", marks=("<|tool_call>", '<|"|>')
    ),
    "gigachat3": Dialect(
        "json_families:GigaChat3ToolParser",
        "GigaChat 3",
        marks=("'role': 'function call'", "<|role_sep|>"),
        other_marks=("function call<|role_sep|>",),
    ),
    "gigachat35": Dialect(
        "dsml_families:GigaChat35ToolParser",
        "GigaChat 3.5",
        marks=("<｜GCML｜tool_calls>", "<｜GCML｜invoke name="),
    ),
    "glm45": Dialect(
        "tagged_families:Glm45ToolParser",
        "GLM-4.5, GLM-4.6",
        marks=("<tool_call>", "<arg_key>"),
        aliases=("glm",),
    ),
    "glm47": Dialect(
        "tagged_families:Glm47ToolParser",
        "GLM-4.7, GLM-5",
        marks=("<tool_call>{function-name}<arg_key>",),
    ),
    "granite": Dialect(
        "json_families:GraniteToolParser",
        "Granite 3",
        marks=("<|tool_call|>",),
        model_types=("granite", "granitemoe", "granitemoehybrid", "granitemoeshared"),
    ),
    "granite-20b-fc": Dialect(
        "json_families:Granite20bFcToolParser", "Granite 20B Function Calling"
    ),
    "granite4": Dialect(
        "hermes:HermesToolParser",
        "Granite 4.0",
        marks=("<tool_call>",),
        model_types=("granite", "granitemoe", "granitemoehybrid", "granitemoeshared"),
    ),
    "hermes": Dialect(
        "hermes:HermesToolParser",
        "Hermes 2 Pro, Hermes 3, Qwen2.5, Qwen3, QwQ",
        marks=("<tool_call>",),
        aliases=("qwen", "qwen25"),
    ),
    "hf": Dialect(
        "hf:HfToolParser",
        "models with a response template",
        declaration="response_template",
        aliases=("response_template",),
    ),
    "hunyuan_a13b": Dialect(
        "json_families:HunyuanA13bToolParser",
        "Hunyuan-A13B",
        marks=("<tool_calls>",),
        model_types=("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    ),
    "hy_v3": Dialect(
        "tagged_families:Hy3ToolParser",
        "Hunyuan 3",
        marks=("<tool_call", "tool_sep", "arg_key"),
        aliases=("hunyuan",),
    ),
    "hy_v4": Dialect("tagged_families:Hy4ToolParser", "Hunyuan 4"),
    "inkling": Dialect(
        "message_families:InklingToolParser", "Inkling", marks=("<|content_invoke_tool_json|>",)
    ),
    "internlm": Dialect(
        "json_families:InternLmToolParser",
        "InternLM2.5",
        marks=("<|action_start|>",),
        aliases=("interns1",),
    ),
    "iquest_q1": Dialect(
        "tagged_families:IQuestQ1ToolParser", "IQuest-Q1", marks=("<iquest_tool_call>",)
    ),
    "jamba": Dialect(
        "json_families:JambaToolParser",
        "Jamba 1.5",
        marks=("<tool_calls>",),
        model_types=("jamba",),
        other_marks=("<tool_calls>[",),
    ),
    "k2_horizon": Dialect(
        "block_families:K2HorizonToolParser", "K2-V3", marks=("<ifm|tool_calls>",)
    ),
    "kimi_k2": Dialect(
        "named_families:KimiK2ToolParser",
        "Kimi K2",
        marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    ),
    "kimi_k3": Dialect(
        "kimi_k3:KimiK3ToolParser", "Kimi K3", marks=("<|open|>", "<|close|>", "<|sep|>")
    ),
    "lfm2": Dialect(
        "python_families:Lfm2ToolParser",
        "LFM2, LFM2.5",
        marks=("<|tool_call_start|>",),
        other_marks=("<|tool_list_start|>",),
    ),
    "ling3": Dialect(
        "tagged_families:Glm47ToolParser",
        "Ling 3",
        marks=("<tool_call>", "<arg_key>"),
        model_types=("bailing_hybrid", "bailing_moe_v3"),
    ),
    "llama3_json": Dialect(
        "json_families:Llama3JsonToolParser",
        "Llama 3.1, Llama 3.2",
        marks=("<|python_tag|>",),
        other_marks=('{"name": function name, "parameters":',),
        aliases=("llama3",),
    ),
    "llama4_json": Dialect("json_families:Llama3JsonToolParser", "Llama 4"),
    "llama4_pythonic": Dialect(
        "python_families:Llama4PythonicToolParser", "Llama 4", marks=("<|python_start|>",)
    ),
    "longcat": Dialect("hermes:LongCatToolParser", "LongCat-Flash", marks=("<longcat_tool_call>",)),
    "mimo": Dialect(
        "tagged_families:MiMoToolParser",
        "MiMo-V2",
        marks=("<tool_call>", "<function="),
        model_types=("mimo_v2", "mimo_v2_flash"),
    ),
    "minicpm5": Dialect(
        "block_families:MiniCpm5ToolParser", "MiniCPM5", marks=("<function name=", "<param name=")
    ),
    "minimax": Dialect("json_families:MiniMaxToolParser", "MiniMax-M1"),
    "minimax_m2": Dialect(
        "tagged_families:MiniMaxM2ToolParser",
        "MiniMax-M2",
        marks=("<minimax:tool_call>",),
        aliases=("minimax-m2",),
    ),
    "minimax_m3": Dialect(
        "block_families:MiniMaxM3ToolParser",
        "MiniMax-M3",
        marks=("]<]minimax[>[",),
        aliases=("minimax-m3",),
    ),
    "mistral": Dialect(
        "named_families:MistralToolParser",
        "Mistral 7B v0.3 and later, Magistral",
        marks=("[TOOL_CALLS]",),
    ),
    "muse": Dialect("message_families:MuseToolParser", "Muse", marks=("<atem:function_calls>",)),
    "muse_glimmer": Dialect(
        "message_families:MuseGlimmerToolParser",
        "Muse Glimmer",
        marks=("<atem:function_calls>", "MuseGlimmer"),
    ),
    "musespark1x": Dialect("message_families:MuseToolParser", "Muse Spark"),
    "nemotron_json": Dialect(
        "json_families:NemotronJsonToolParser",
        "Nemotron Nano 2, Llama Nemotron",
        marks=("<TOOLCALL>",),
    ),
    "olmo3": Dialect(
        "python_families:Olmo3ToolParser",
        "OLMo 3",
        marks=("<function_calls>",),
        model_types=("olmo3",),
    ),
    "openai": Dialect(
        "harmony:HarmonyToolParser",
        "gpt-oss",
        marks=("<|channel|>", "<|message|>"),
        aliases=("gpt-oss",),
    ),
    "phi4_mini_json": Dialect(
        "json_families:Phi4MiniJsonToolParser",
        "Phi-4-mini",
        marks=("<|tool_call|>",),
        model_types=("phi3",),
    ),
    "plamo3": Dialect(
        "named_families:Plamo3ToolParser", "PLaMo 3", marks=("<|plamo:begin_tool_request",)
    ),
    "poolside_v1": Dialect(
        "tagged_families:PoolsideToolParser",
        "Laguna",
        marks=("<tool_call>", "<arg_key>"),
        model_types=("laguna",),
    ),
    "pythonic": Dialect("python_families:PythonicToolParser", "Llama 3.2, ToolACE"),
    "qwen3_coder": Dialect(
        "tagged_families:Qwen3CoderToolParser",
        "Qwen3-Coder",
        marks=("<tool_call>", "<function="),
        aliases=("nanbeige",),
    ),
    "qwen3_json": Dialect("hermes:HermesToolParser", "Qwen3"),
    "qwen3_xml": Dialect("tagged_families:Qwen3CoderToolParser", "Qwen3-Coder"),
    "seed_oss": Dialect(
        "tagged_families:SeedOssToolParser", "Seed-OSS", marks=("<seed:tool_call>",)
    ),
    "spark25": Dialect("block_families:Spark25ToolParser", "Spark X2.5"),
    "step3": Dialect("tagged_families:Step3ToolParser", "Step-3", marks=("<steptml:invoke",)),
    "step3p5": Dialect(
        "tagged_families:Qwen3CoderToolParser",
        "Step-3.5",
        marks=("<tool_call>", "<function="),
        model_types=("step3p5", "step3p7"),
    ),
    "step5": Dialect("tagged_families:Qwen3CoderToolParser", "Step-5"),
    "trinity": Dialect("hermes:TrinityToolParser", "Trinity"),
    "xlam": Dialect("json_families:XlamToolParser", "xLAM 2"),
}


@hookimpl
def register_tool_parsers(registry: Any) -> None:
    for name, dialect in _PARSERS.items():
        dialect.register(registry, name, _HERE)

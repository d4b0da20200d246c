"""The reasoning parsers that come with Jackfield."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl

_HERE = "jackfield.plugins.reasoning"
_PARSERS = {
    "apertus2509": ("think_tags:ApertusReasoning", "Apertus 2509"),
    "beam": ("messages:BeamReasoning", "Beam"),
    "cohere_command3": ("cohere:CohereCommand3Reasoning", "Command A"),
    "cohere_command4": ("cohere:CohereCommand4Reasoning", "Cohere's models after Command A"),
    "deepseek_r1": ("think_tags:DeepSeekR1Reasoning", "DeepSeek-R1, QwQ"),
    "deepseek_v3": ("think_tags:DeepSeekV3Reasoning", "DeepSeek-V3.1"),
    "deepseek_v4": ("think_tags:DeepSeekV4Reasoning", "DeepSeek-V4"),
    "deepseek_v41": ("think_tags:DeepSeekV4Reasoning", "DeepSeek-V4.1"),
    "ernie45": ("think_tags:Ernie45Reasoning", "ERNIE 4.5 Thinking"),
    "gemma4": ("think_tags:Gemma4Reasoning", "Gemma 4"),
    "gigachat35": ("think_tags:GigaChat35Reasoning", "GigaChat 3.5"),
    "glm45": ("think_tags:Glm45Reasoning", "GLM-4.5, GLM-4.6"),
    "glm47": ("think_tags:Glm47Reasoning", "GLM-4.7, GLM-5"),
    "gptoss": ("harmony:HarmonyReasoning", "gpt-oss"),
    "granite": ("think_tags:GraniteReasoning", "Granite 3.2"),
    "granite_thinking_parser": ("think_tags:NemotronReasoning", "Granite 4"),
    "hf": ("hf:HfReasoning", "models with a response template"),
    "holo2": ("think_tags:Holo2Reasoning", "Holo2"),
    "hunyuan_a13b": ("think_tags:HunyuanA13bReasoning", "Hunyuan-A13B"),
    "hy_v3": ("think_tags:Hy3Reasoning", "Hunyuan 3"),
    "hy_v4": ("think_tags:Hy3Reasoning", "Hunyuan 4"),
    "identity": ("think_tags:IdentityReasoning", "any"),
    "inkling": ("messages:InklingReasoning", "Inkling"),
    "interns1": ("think_tags:Qwen3Reasoning", "Intern-S1"),
    "iquest_q1": ("think_tags:IQuestQ1Reasoning", "IQuest-Q1"),
    "k2_horizon": ("think_tags:K2HorizonReasoning", "K2-V3"),
    "kimi": ("think_tags:KimiReasoning", "Kimi-VL, Kimi k1.5"),
    "kimi_k2": ("think_tags:KimiK2Reasoning", "Kimi K2 Thinking"),
    "kimi_k3": ("kimi_k3:KimiK3Reasoning", "Kimi K3"),
    "ling3": ("think_tags:Glm47Reasoning", "Ling 3"),
    "mimo": ("think_tags:Qwen3Reasoning", "MiMo-V2"),
    "minicpmv": ("think_tags:MiniCpmVReasoning", "MiniCPM-V"),
    "minimax_m2": ("think_tags:MiniMaxM2Reasoning", "MiniMax-M2"),
    "minimax_m2_append_think": ("think_tags:MiniMaxM2AppendThinkReasoning", "MiniMax-M2"),
    "minimax_m3": ("think_tags:MiniMaxM3Reasoning", "MiniMax-M3"),
    "mistral": ("think_tags:MistralReasoning", "Magistral"),
    "muse": ("messages:MuseReasoning", "Muse"),
    "muse_glimmer": ("messages:MuseGlimmerReasoning", "Muse Glimmer"),
    "musespark1x": ("messages:MuseReasoning", "Muse Spark"),
    "nemotron_3": ("think_tags:NemotronReasoning", "Nemotron 3"),
    "nemotron_v3": ("think_tags:NemotronReasoning", "Nemotron 3"),
    "olmo3": ("think_tags:Olmo3Reasoning", "OLMo 3 Think"),
    "openai_gptoss": ("harmony:HarmonyReasoning", "gpt-oss"),
    "plamo3": ("think_tags:Plamo3Reasoning", "PLaMo 3"),
    "poolside_v1": ("think_tags:PoolsideReasoning", "Laguna"),
    "qwen3": ("think_tags:Qwen3Reasoning", "Qwen3"),
    "seed_oss": ("think_tags:SeedOssReasoning", "Seed-OSS"),
    "step3": ("think_tags:Step3Reasoning", "Step-3"),
    "step3p5": ("think_tags:Step3p5Reasoning", "Step-3.5"),
    "step5": ("think_tags:DeepSeekR1Reasoning", "Step-5"),
    "think_tags": ("think_tags:ThinkTagsReasoning", "any model with optional reasoning"),
}
"""name → (module and class, model family)"""
_MARKS = {
    "apertus2509": ("<|inner_prefix|>",),
    "beam": ("<|channel|>", "<|constrain|>xml", "<rfl:parameter"),
    "cohere_command3": ("<|START_THINKING|>", "<|START_RESPONSE|>"),
    "cohere_command4": ("<|START_THINKING|>", "<|START_TEXT|>"),
    "deepseek_r1": ("<｜Assistant｜><think>",),
    "deepseek_v3": ("<｜Assistant｜>", "</think>", "thinking"),
    "deepseek_v4": ("<｜DSML｜tool_calls>", "</think>"),
    "deepseek_v41": ("<｜DSML｜ calls>", "</think>"),
    "ernie45": ("<think>", "<response>"),
    "gemma4": ("<|channel>", "<channel|>"),
    "gigachat35": ("<｜GCML｜tool_calls>", "<think>"),
    "glm45": ("<think>", "enable_thinking"),
    "glm47": ("<tool_call>{function-name}<arg_key>", "</think>"),
    "gptoss": ("<|channel|>", "<|message|>"),
    "granite": ("Here is my thought process:",),
    "hunyuan_a13b": ("<think>",),
    "hy_v3": ("tool_sep", "think"),
    "inkling": ("<|content_thinking|>",),
    "iquest_q1": ("<iquest_tool_call>", "<think>"),
    "k2_horizon": ("<ifm|think>",),
    "kimi": ("◁think▷",),
    "kimi_k2": ("<|tool_calls_section_begin|>", "</think>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "ling3": ("<think>",),
    "mimo": ("<think>", "enable_thinking"),
    "minimax_m2": ("<think>",),
    "minimax_m3": ("<mm:think>",),
    "mistral": ("[THINK]",),
    "muse": ("<atem:function_calls>",),
    "muse_glimmer": ("<atem:function_calls>", "MuseGlimmer"),
    "nemotron_v3": ("<think>",),
    "olmo3": ("<think>",),
    "plamo3": ("<|plamo:begin_think",),
    "poolside_v1": ("<think>",),
    "qwen3": ("<think>", "enable_thinking"),
    "seed_oss": ("<seed:think>",),
    "step3": ("<think>",),
    "step3p5": ("<think>",),
    "think_tags": ("<think>",),
}
"""name → what `auto` knows a model's chat template by"""
_MODEL_TYPES = {
    "deepseek_v3": ("deepseek_v3",),
    "glm45": ("glm4_moe",),
    "glm47": ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    "hunyuan_a13b": ("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    "ling3": ("bailing_hybrid", "bailing_moe_v3"),
    "mimo": ("mimo_v2", "mimo_v2_flash"),
    "minimax_m2": ("minimax_m2",),
    "nemotron_v3": ("nemotron_h",),
    "olmo3": ("olmo3",),
    "poolside_v1": ("laguna",),
    "step3p5": ("step3p5", "step3p7"),
    "step3": ("step3_text", "step3_vl"),
}
"""name → model types that share those marks with no others"""
_OTHER_MARKS = {"hunyuan_a13b": ("<think>", "<answer>")}
"""name → what `auto` knows another chat template of such models by"""
_DECLARATIONS = {"hf": "response_template"}
"""name → field of tokenizer_config.json in which a checkpoint declares what the parser reads"""
_ALIASES = {
    "deepseek_r1": ("deepseek-r1", "minimax", "qwen3-thinking"),
    "deepseek_v3": ("deepseek-v3",),
    "deepseek_v4": ("deepseek-v4",),
    "deepseek_v41": ("deepseek-v41",),
    "gptoss": ("gpt-oss",),
    "hf": ("response_template",),
    "hy_v3": ("hunyuan",),
    "minimax_m2_append_think": ("minimax-append-think",),
    "minimax_m3": ("minimax-m3",),
    "qwen3": ("dots", "nanbeige"),
}
"""name → what SGLang calls it"""


@hookimpl
def register_reasoning_parsers(registry: Any) -> None:
    for name, (place, models) in _PARSERS.items():
        registry.add(
            name, f"{_HERE}.{place}", help=models, marks=_MARKS.get(name, ()),
            model_types=_MODEL_TYPES.get(name, ()), other_marks=_OTHER_MARKS.get(name, ()),
            aliases=_ALIASES.get(name, ()),
            declaration=_DECLARATIONS.get(name, ""),
        )  # fmt: skip

"""The reasoning parsers that come with Jackfield."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl
from ..parsing.dialect import Dialect

_HERE = "jackfield.plugins.reasoning"
_PARSERS: dict[str, Dialect] = {
    "apertus2509": Dialect(
        "think_tags:ApertusReasoning", "Apertus 2509", marks=("<|inner_prefix|>",)
    ),
    "beam": Dialect(
        "messages:BeamReasoning",
        "Beam",
        marks=("<|channel|>", "<|constrain|>xml", "<rfl:parameter"),
    ),
    "cohere_command3": Dialect(
        "cohere:CohereCommand3Reasoning",
        "Command A",
        marks=("<|START_THINKING|>", "<|START_RESPONSE|>"),
    ),
    "cohere_command4": Dialect(
        "cohere:CohereCommand4Reasoning",
        "Cohere's models after Command A",
        marks=("<|START_THINKING|>", "<|START_TEXT|>"),
    ),
    "deepseek_r1": Dialect(
        "think_tags:DeepSeekR1Reasoning",
        "DeepSeek-R1, QwQ",
        marks=("<｜Assistant｜><think>",),
        aliases=("deepseek-r1", "minimax", "qwen3-thinking"),
    ),
    "deepseek_v3": Dialect(
        "think_tags:DeepSeekV3Reasoning",
        "DeepSeek-V3.1",
        marks=("<｜Assistant｜>", "</think>", "thinking"),
        model_types=("deepseek_v3",),
        aliases=("deepseek-v3",),
    ),
    "deepseek_v4": Dialect(
        "think_tags:DeepSeekV4Reasoning",
        "DeepSeek-V4",
        marks=("<｜DSML｜tool_calls>", "</think>"),
        aliases=("deepseek-v4",),
    ),
    "deepseek_v41": Dialect(
        "think_tags:DeepSeekV4Reasoning",
        "DeepSeek-V4.1",
        marks=("<｜DSML｜ calls>", "</think>"),
        aliases=("deepseek-v41",),
    ),
    "ernie45": Dialect(
        "think_tags:Ernie45Reasoning", "ERNIE 4.5 Thinking", marks=("<think>", "<response>")
    ),
    "gemma4": Dialect("think_tags:Gemma4Reasoning", "Gemma 4", marks=("<|channel>", "<channel|>")),
    "gigachat35": Dialect(
        "think_tags:GigaChat35Reasoning", "GigaChat 3.5", marks=("<｜GCML｜tool_calls>", "<think>")
    ),
    "glm45": Dialect(
        "think_tags:Glm45Reasoning",
        "GLM-4.5, GLM-4.6",
        marks=("<think>", "enable_thinking"),
        model_types=("glm4_moe",),
    ),
    "glm47": Dialect(
        "think_tags:Glm47Reasoning",
        "GLM-4.7, GLM-5",
        marks=("<tool_call>{function-name}<arg_key>", "</think>"),
        model_types=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
    ),
    "gptoss": Dialect(
        "harmony:HarmonyReasoning",
        "gpt-oss",
        marks=("<|channel|>", "<|message|>"),
        aliases=("gpt-oss",),
    ),
    "granite": Dialect(
        "think_tags:GraniteReasoning", "Granite 3.2", marks=("Here is my thought process:",)
    ),
    "granite_thinking_parser": Dialect("think_tags:NemotronReasoning", "Granite 4"),
    "hf": Dialect(
        "hf:HfReasoning",
        "models with a response template",
        declaration="response_template",
        aliases=("response_template",),
    ),
    "holo2": Dialect("think_tags:Holo2Reasoning", "Holo2"),
    "hunyuan_a13b": Dialect(
        "think_tags:HunyuanA13bReasoning",
        "Hunyuan-A13B",
        marks=("<think>",),
        model_types=("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        other_marks=("<think>", "<answer>"),
    ),
    "hy_v3": Dialect(
        "think_tags:Hy3Reasoning", "Hunyuan 3", marks=("tool_sep", "think"), aliases=("hunyuan",)
    ),
    "hy_v4": Dialect("think_tags:Hy3Reasoning", "Hunyuan 4"),
    "identity": Dialect("think_tags:IdentityReasoning", "any"),
    "inkling": Dialect("messages:InklingReasoning", "Inkling", marks=("<|content_thinking|>",)),
    "interns1": Dialect("think_tags:Qwen3Reasoning", "Intern-S1"),
    "iquest_q1": Dialect(
        "think_tags:IQuestQ1Reasoning", "IQuest-Q1", marks=("<iquest_tool_call>", "<think>")
    ),
    "k2_horizon": Dialect("think_tags:K2HorizonReasoning", "K2-V3", marks=("<ifm|think>",)),
    "kimi": Dialect("think_tags:KimiReasoning", "Kimi-VL, Kimi k1.5", marks=("◁think▷",)),
    "kimi_k2": Dialect(
        "think_tags:KimiK2Reasoning",
        "Kimi K2 Thinking",
        marks=("<|tool_calls_section_begin|>", "</think>"),
    ),
    "kimi_k3": Dialect(
        "kimi_k3:KimiK3Reasoning", "Kimi K3", marks=("<|open|>", "<|close|>", "<|sep|>")
    ),
    "ling3": Dialect(
        "think_tags:Glm47Reasoning",
        "Ling 3",
        marks=("<think>",),
        model_types=("bailing_hybrid", "bailing_moe_v3"),
    ),
    "mimo": Dialect(
        "think_tags:Qwen3Reasoning",
        "MiMo-V2",
        marks=("<think>", "enable_thinking"),
        model_types=("mimo_v2", "mimo_v2_flash"),
    ),
    "minicpmv": Dialect("think_tags:MiniCpmVReasoning", "MiniCPM-V"),
    "minimax_m2": Dialect(
        "think_tags:MiniMaxM2Reasoning",
        "MiniMax-M2",
        marks=("<think>",),
        model_types=("minimax_m2",),
    ),
    "minimax_m2_append_think": Dialect(
        "think_tags:MiniMaxM2AppendThinkReasoning", "MiniMax-M2", aliases=("minimax-append-think",)
    ),
    "minimax_m3": Dialect(
        "think_tags:MiniMaxM3Reasoning",
        "MiniMax-M3",
        marks=("<mm:think>",),
        aliases=("minimax-m3",),
    ),
    "mistral": Dialect("think_tags:MistralReasoning", "Magistral", marks=("[THINK]",)),
    "muse": Dialect("messages:MuseReasoning", "Muse", marks=("<atem:function_calls>",)),
    "muse_glimmer": Dialect(
        "messages:MuseGlimmerReasoning",
        "Muse Glimmer",
        marks=("<atem:function_calls>", "MuseGlimmer"),
    ),
    "musespark1x": Dialect("messages:MuseReasoning", "Muse Spark"),
    "nemotron_3": Dialect("think_tags:NemotronReasoning", "Nemotron 3"),
    "nemotron_v3": Dialect(
        "think_tags:NemotronReasoning",
        "Nemotron 3",
        marks=("<think>",),
        model_types=("nemotron_h",),
    ),
    "olmo3": Dialect(
        "think_tags:Olmo3Reasoning", "OLMo 3 Think", marks=("<think>",), model_types=("olmo3",)
    ),
    "openai_gptoss": Dialect("harmony:HarmonyReasoning", "gpt-oss"),
    "plamo3": Dialect("think_tags:Plamo3Reasoning", "PLaMo 3", marks=("<|plamo:begin_think",)),
    "poolside_v1": Dialect(
        "think_tags:PoolsideReasoning", "Laguna", marks=("<think>",), model_types=("laguna",)
    ),
    "qwen3": Dialect(
        "think_tags:Qwen3Reasoning",
        "Qwen3",
        marks=("<think>", "enable_thinking"),
        aliases=("dots", "nanbeige"),
    ),
    "seed_oss": Dialect("think_tags:SeedOssReasoning", "Seed-OSS", marks=("<seed:think>",)),
    "step3": Dialect(
        "think_tags:Step3Reasoning",
        "Step-3",
        marks=("<think>",),
        model_types=("step3_text", "step3_vl"),
    ),
    "step3p5": Dialect(
        "think_tags:Step3p5Reasoning",
        "Step-3.5",
        marks=("<think>",),
        model_types=("step3p5", "step3p7"),
    ),
    "step5": Dialect("think_tags:DeepSeekR1Reasoning", "Step-5"),
    "think_tags": Dialect(
        "think_tags:ThinkTagsReasoning", "any model with optional reasoning", marks=("<think>",)
    ),
}


@hookimpl
def register_reasoning_parsers(registry: Any) -> None:
    for name, dialect in _PARSERS.items():
        dialect.register(registry, name, _HERE)

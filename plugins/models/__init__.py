"""Model architectures that ship in the box."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl
from .refused import REFUSED
from .text_parts import TEXT_PARTS, TEXT_TYPES

ARCHITECTURES = {
    "afmoe": ("AfmoeForCausalLM",),
    "apertus": ("ApertusForCausalLM", "Apertus1p5TextForCausalLM"),
    "arctic": ("ArcticForCausalLM",),
    "axk2": ("AXK2ForCausalLM",),
    "baichuan": ("BaichuanForCausalLM",),
    "bailing_linear": ("BailingMoeV2_5ForCausalLM",),
    "bailing_moe": ("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"),
    "bamba": ("BambaForCausalLM", "GraniteMoeHybridForCausalLM"),
    "bart": (
        "BartForConditionalGeneration",
        "BlenderbotForConditionalGeneration",
        "BlenderbotSmallForConditionalGeneration",
        "M2M100ForConditionalGeneration",
        "MBartForConditionalGeneration",
        "MarianMTModel",
        "MvpForConditionalGeneration",
        "PegasusForConditionalGeneration",
    ),
    "bert": ("BertModel", "BertForSequenceClassification", "BertForTokenClassification"),
    "bloom": ("BloomForCausalLM",),
    "chatglm": ("ChatGLMModel",),
    "cohere": ("CohereForCausalLM", "Cohere2ForCausalLM"),
    "exaone": ("ExaoneForCausalLM",),
    "exaone4": ("Exaone4ForCausalLM",),
    "falcon": ("FalconForCausalLM",),
    "dbrx": ("DbrxForCausalLM",),
    "decilm": ("DeciLMForCausalLM",),
    "deepseek": (
        "AXK1ForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "SarvamMLAForCausalLM",
        "YoutuForCausalLM",
    ),
    "deepseek_moe": (
        "DeepseekForCausalLM", "DeepseekOcr2TextForCausalLM", "Dots1ForCausalLM",
        "Glm4MoeForCausalLM", "SolarOpenForCausalLM",
    ),
    "dory": ("DoryForCausalLM",),
    "ernie_moe": ("Ernie4_5_MoeForCausalLM",),
    "exaone_moe": ("ExaoneMoeForCausalLM",),
    "granite_moe": (
        "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteMoeSWAForCausalLM",
    ),
    "hunyuan_moe": ("HunYuanMoEV1ForCausalLM", "HYV3ForCausalLM"),
    "llama4": ("Llama4ForCausalLM",),
    "mellum": ("MellumForCausalLM",),
    "minimax": ("MiniMaxForCausalLM",),
    "minimax_m2": ("MiniMaxM2ForCausalLM",),
    "minimax_m3": ("MiniMaxM3SparseForCausalLM",),
    "olmoe": ("OlmoeForCausalLM", "FlexOlmoForCausalLM"),
    "phimoe": ("PhimoeForCausalLM",),
    "diffllama": ("DiffLlamaForCausalLM",),
    "falcon_h1": ("FalconH1ForCausalLM",),
    "gemma": ("GemmaForCausalLM", "GemmaModel", "GemmaForSequenceClassification"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Model", "Gemma2ForSequenceClassification"),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3TextForSequenceClassification"),
    "gemma3n": ("Gemma3nForCausalLM",),
    "gemma4": ("Gemma4ForCausalLM",),
    "glm4": (
        "Glm4ForCausalLM", "Glm4Model", "Glm4ForSequenceClassification", "GlmOcrTextForCausalLM",
    ),
    "gpt2": ("GPT2LMHeadModel", "GPTBigCodeForCausalLM"),
    "gpt_neo": ("GPTNeoForCausalLM",),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXJapaneseForCausalLM"),
    "gpt_oss": ("GptOssForCausalLM",),
    "gptj": ("GPTJForCausalLM", "CodeGenForCausalLM"),
    "granite": ("GraniteForCausalLM", "GraniteModel"),
    "granite_swa": ("GraniteSWAForCausalLM", "HyperCLOVAXForCausalLM"),
    "helium": (
        "HeliumForCausalLM", "Ernie4_5ForCausalLM", "GlmForCausalLM", "PaddleOCRTextForCausalLM",
    ),
    "hrm_text": ("HrmTextForCausalLM",),
    "hunyuan": ("HunYuanDenseV1ForCausalLM",),
    "internlm2": ("InternLM2ForCausalLM", "InternLM2ForRewardModel"),
    "iquest_loop": ("IQuestLoopCoderForCausalLM",),
    "jamba": ("JambaForCausalLM",),
    "jetmoe": ("JetMoeForCausalLM",),
    "kimi_linear": ("BailingHybridForCausalLM", "KimiLinearForCausalLM"),
    "lara_mini": ("LaraMiniForCausalLM",),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
    "lfm3": ("Lfm3ForCausalLM",),
    "llama": ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"),
    "longcat": ("LongcatFlashForCausalLM",),
    "longcat_ngram": ("LongcatFlashNgramForCausalLM",),
    "mamba": ("MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM"),
    "mimo": ("MiMoForCausalLM",),
    "mimo_v2": ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    "minicpm": ("MiniCPMForCausalLM", "MiniCPM3ForCausalLM"),
    "ministral": (
        "MinistralForCausalLM",
        "Ministral3ForCausalLM",
        "SeedOssForCausalLM",
        "CwmForCausalLM",
    ),
    "mistral": ("MistralForCausalLM", "MistralModel", "MistralForSequenceClassification"),
    "mistral_large": ("Mistral4ForCausalLM", "MistralLarge3ForCausalLM"),
    "mixtral": ("MixtralForCausalLM",),
    "mpt": ("MptForCausalLM",),
    "nanochat": ("NanoChatForCausalLM",),
    "nemotron": ("NemotronForCausalLM", "Jais2ForCausalLM", "ArceeForCausalLM"),
    "nemotron_h": ("NemotronHForCausalLM",),
    "nemotron_puzzle": ("NemotronHPuzzleForCausalLM",),
    "olmo": ("OlmoForCausalLM",),
    "olmo_hybrid": ("OlmoHybridForCausalLM",),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Model", "Olmo2ForSequenceClassification"),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Model", "Olmo3ForSequenceClassification"),
    "openai_gpt": ("OpenAIGPTLMHeadModel",),
    "opt": ("OPTForCausalLM", "BioGptForCausalLM"),
    "orion": ("OrionForCausalLM",),
    "ouro": ("OuroForCausalLM",),
    "pangu": ("PanguUltraMoEForCausalLM",),
    "phi": ("PhiForCausalLM", "PersimmonForCausalLM"),
    "phi3": (
        "Phi3ForCausalLM", "Phi3Model", "Phi3ForSequenceClassification", "Phi4MMTextForCausalLM",
    ),
    "plamo2": ("Plamo2ForCausalLM",),
    "plamo3": ("Plamo3ForCausalLM",),
    "qwen": ("QWenLMHeadModel",),
    "qwen2": (
        "Qwen2ForCausalLM", "Qwen2Model", "Qwen2ForSequenceClassification", "Qwen2ForRewardModel",
        "Qwen2ForProcessRewardModel",
    ),
    "qwen2_moe": ("Qwen2MoeForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3VLMoeTextForCausalLM"),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    "retrieval": ("ColPaliTextModel", "ColQwen2TextModel"),
    "rnj1": ("Rnj1ForCausalLM",),
    "roberta": (
        "RobertaModel", "RobertaForSequenceClassification", "RobertaForTokenClassification",
        "BgeM3EmbeddingModel",
    ),
    "rotary_encoders": (
        "GteModel", "GteForSequenceClassification", "GteForTokenClassification", "ModernBertModel",
        "ModernBertForSequenceClassification", "ModernBertForTokenClassification", "NomicBertModel",
        "NomicBertForSequenceClassification", "NomicBertForTokenClassification",
    ),
    "smollm3": ("SmolLM3ForCausalLM",),
    "solar": ("SolarForCausalLM",),
    "starcoder2": ("Starcoder2ForCausalLM",),
    "step": ("Step3p5ForCausalLM",),
    "step1": ("Step1ForCausalLM",),
    "step3": ("Step3TextForCausalLM",),
    "t5": (
        "MT5ForConditionalGeneration", "T5ForConditionalGeneration", "UMT5ForConditionalGeneration",
    ),
    "telechat": ("TeleChat2ForCausalLM",),
    "teleflm": ("TeleFLMForCausalLM",),
    "vaultgemma": ("VaultGemmaForCausalLM",),
    "whisper": ("WhisperForConditionalGeneration",),
    "xglm": ("XGLMForCausalLM",),
    "zamba": ("ZambaForCausalLM",),
    "zamba2": ("Zamba2ForCausalLM",),
    "zaya": ("ZayaForCausalLM",),
}  # fmt: skip
"""Module → its architectures, by class name."""
LLAMA = (
    "AquilaForCausalLM", "AquilaModel", "IQuestCoderForCausalLM", "InternLMForCausalLM",
    "InternLM3ForCausalLM", "LLaMAForCausalLM", "PanguEmbeddedForCausalLM",
    "TeleChat3ForCausalLM", "XverseForCausalLM",
)  # fmt: skip
SAME = {
    **dict.fromkeys(LLAMA, "llama:LlamaForCausalLM"),
    "BailingMoeV3ForCausalLM": "kimi_linear:BailingHybridForCausalLM",
    "BaiChuanForCausalLM": "baichuan:BaichuanForCausalLM",
    "ChatGLMForConditionalGeneration": "chatglm:ChatGLMModel",
    "BertForMaskedLM": "bert:BertModel",
    "Ernie4_5_ForCausalLM": "helium:Ernie4_5ForCausalLM",
    "ExaoneMoEForCausalLM": "exaone_moe:ExaoneMoeForCausalLM",
    **dict.fromkeys(
        ("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"), "minimax:MiniMaxForCausalLM"
    ),
    "Gemma4UnifiedForCausalLM": "gemma4:Gemma4ForCausalLM",
    "GteForMaskedLM": "rotary_encoders:GteModel",
    "ModernBertForMaskedLM": "rotary_encoders:ModernBertModel",
    "NomicBertForMaskedLM": "rotary_encoders:NomicBertModel",
    "GritLM": "mistral:MistralForCausalLM",
    "MPTForCausalLM": "mpt:MptForCausalLM",
    **dict.fromkeys(
        ("Param2MoEForCausalLM", "SarvamMoEForCausalLM"), "bailing_moe:BailingMoeV2ForCausalLM"
    ),
    "PhiMoEForCausalLM": "phimoe:PhimoeForCausalLM",
    "TeleChatForCausalLM": "telechat:TeleChat2ForCausalLM",
    "PLBartForConditionalGeneration": "bart:BartForConditionalGeneration",
    "RWForCausalLM": "falcon:FalconForCausalLM",
    "RobertaForMaskedLM": "roberta:RobertaModel",
    "XLMRobertaForMaskedLM": "roberta:RobertaModel",
    "XLMRobertaModel": "roberta:RobertaModel",
    "XLMRobertaForSequenceClassification": "roberta:RobertaForSequenceClassification",
    "XLMRobertaForTokenClassification": "roberta:RobertaForTokenClassification",
}
"""Architectures served by the class of another one. Masked models serve their encoder only."""
CONFIGS = {
    **dict.fromkeys(
        (
            "PanguEmbedded",
            "aquila",
            "internlm",
            "internlm2",
            "mimo",
            "nemotron-nas",
            "ouro",
            "solar",
            "telechat3",
            "xverse",
        ),
        "LlamaLikeConfig",
    ),
    "arctic": "ArcticConfig",
    "baichuan": "BaichuanConfig",
    **dict.fromkeys(("bailing_moe", "bailing_moe_v2", "sarvam_moe"), "BailingConfig"),
    "chatglm": "ChatGLMConfig",
    "deepseek": "DeepseekMoeConfig",
    "deepseek_vl_v2": "whole_configs:DeepseekVlV2Config",
    "exaone": "ExaoneConfig",
    "internvl_chat": "whole_configs:InternVLChatConfig",
    "iquestloopcoder": "LoopCoderConfig",
    "kimi_k2": "KimiK2Config",
    "kimi_vl": "whole_configs:KimiVLConfig",
    "longcat_flash_ngram": "longcat_config:LongcatNgramConfig",
    "mimo_v2": "mimo_v2_config:MiMoV2Config",
    "minicpm": "MiniCPMConfig",
    **dict.fromkeys(("minicpmo", "minicpmv"), "whole_configs:MiniCPMVConfig"),
    "phi3_v": "whole_configs:Phi3VConfig",
    "phi4mm": "whole_configs:Phi4MMConfig",
    **dict.fromkeys(("RefinedWeb", "RefinedWebModel"), "RefinedWebConfig"),
    **dict.fromkeys(("minimax_m1", "minimax_text_01"), "MiniMaxText01Config"),
    "nemotron_h_puzzle": "nemotron_puzzle_config:NemotronPuzzleConfig",
    "orion": "OrionConfig",
    "pangu_ultra_moe": "PanguUltraConfig",
    "param2moe": "Param2MoeConfig",
    "plamo2": "Plamo2Config",
    "plamo3": "Plamo3Config",
    "qwen": "QWenConfig",
    "sarvam_mla": "SarvamMlaConfig",
    "step1": "Step1Config",
    "step3p5": "StepConfig",
    "step3_text": "Step3TextConfig",
    "telechat": "TelechatConfig",
    "TeleFLM": "TeleFLMConfig",
    "ultravox": "whole_configs:UltravoxConfig",
}
"""Model types that `transformers` does not know → class in `configs.py`, or "module:class"."""
PLAIN = {
    "bert": "BERT", "granite": "GRANITE", "llama": "LLAMA", "mistral": "MISTRAL",
    "mixtral": "MIXTRAL", "olmo2": "OLMO2", "qwen2": "QWEN2", "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3_MOE", **dict.fromkeys(("roberta", "xlm-roberta"), "ROBERTA"),
}  # fmt: skip
"""Model types that need no `transformers` → `PlainConfig` in `plain_configs.py`."""


@hookimpl
def register_models(registry: Any) -> None:
    classes = {
        name: f"{module}:{name}" for module, names in ARCHITECTURES.items() for name in names
    }
    for name, place in (classes | SAME).items():
        registry.add(name, f"jackfield.plugins.models.{place}")
    for suffix in ("ForSequenceClassification", "ForTokenClassification"):
        for of in ("ForCausalLM", "LMHeadModel"):
            registry.derive(suffix, of, "jackfield.plugins.models.decoder:classifier_of")
    registry.add("*", "jackfield.plugins.models.fallback.model:TransformersLM")
    for name, of in TEXT_PARTS.items():
        registry.add_text_part(name, of)
    for model_type, of in TEXT_TYPES.items():
        registry.add_text_type(model_type, of)
    for reason, names in REFUSED.items():
        for name in names:
            registry.refuse(name, reason)


@hookimpl
def register_configs(registry: Any) -> None:
    for model_type, name in CONFIGS.items():
        place = name if ":" in name else f"configs:{name}"
        registry.add(model_type, f"jackfield.plugins.models.{place}")
    for model_type, name in PLAIN.items():
        registry.add(model_type, f"jackfield.plugins.models.plain_configs:{name}")


@hookimpl
def register_logits_processors(registry: Any) -> None:
    registry.add("timestamp_rules", "jackfield.plugins.models.timestamp_rules:TimestampRules")

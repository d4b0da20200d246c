"""Media models: how multimodal architectures take media."""

from __future__ import annotations

from typing import Any

from ...core.hooks import hookimpl

DERIVED = (
    "AyaVisionForConditionalGeneration", "LightOnOcrForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
)  # fmt: skip
"""Those whose door is the processor of `transformers`; tests compare each with it."""
MODELS = {
    **dict.fromkeys(DERIVED, "derived:Derived"),
    "AudioFlamingo3ForConditionalGeneration": "whisper_like:AudioFlamingo3",
    "ColPaliForRetrieval": "retrieval:ColPali",
    "ColQwen2ForRetrieval": "retrieval:ColQwen",
    "Cohere2VisionForConditionalGeneration": "cohere2_vision:Cohere2Vision",
    "DeepseekOCRForCausalLM": "deepseek_ocr:DeepseekOcr",
    "DeepseekOcr2ForConditionalGeneration": "deepseek_ocr2:DeepseekOcr2",
    "Gemma3ForConditionalGeneration": "gemma3:Gemma3",
    "Gemma3nForConditionalGeneration": "gemma3n:Gemma3n",
    "Gemma4ForConditionalGeneration": "gemma4:Gemma4",
    "GlmAsrForConditionalGeneration": "whisper_like:GlmAsr",
    "Glm46VForConditionalGeneration": "qwen_vl:Glm46V",
    "Glm4vForConditionalGeneration": "qwen_vl:Glm4v",
    "Glm4vMoeForConditionalGeneration": "qwen_vl:Glm4v",
    "GraniteSpeechForConditionalGeneration": "granite_speech:GraniteSpeech",
    "GlmOcrForConditionalGeneration": "qwen_vl:QwenPictures",
    "Idefics2ForConditionalGeneration": "idefics2:Idefics2",
    "Idefics3ForConditionalGeneration": "idefics3:Idefics3",
    "InternVLChatModel": "internvl_chat:InternVLChat",
    "InternVLForConditionalGeneration": "internvl:InternVL",
    **dict.fromkeys(
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        "kimi_k25:KimiK25",
    ),
    "KimiVLForConditionalGeneration": "kimi_vl:KimiVL",
    "Lfm2VlForConditionalGeneration": "lfm2_vl:Lfm2Vl",
    "Llama4ForConditionalGeneration": "llama4:Llama4",
    "LlavaForConditionalGeneration": "llava:Llava",
    "LlavaOnevisionForConditionalGeneration": "llava_onevision:LlavaOnevision",
    "LlavaNextVideoForConditionalGeneration": "llava_next_video:LlavaNextVideo",
    **dict.fromkeys(("MiniCPMO", "MiniCPMV"), "minicpmv_resampled:MiniCPMVResampled"),
    "MiniCPMV4_6ForConditionalGeneration": "minicpmv:MiniCPMV",
    "Mistral3ForConditionalGeneration": "pixtral:Mistral3",
    "Qwen2AudioForConditionalGeneration": "whisper_like:Qwen2Audio",
    "Qwen2_5OmniForConditionalGeneration": "omni:Qwen2Omni",
    "Qwen2_5OmniModel": "omni:Qwen2Omni",
    "Ovis2ForConditionalGeneration": "ovis2:Ovis2",
    "PaddleOCRVLForConditionalGeneration": "qwen_vl:PaddleOcr",
    "PaliGemmaForConditionalGeneration": "paligemma:PaliGemma",
    "Phi3VForCausalLM": "phi3_vision:Phi3Vision",
    **dict.fromkeys(
        ("Phi4MMForCausalLM", "Phi4MultimodalForCausalLM"), "phi4_multimodal:Phi4Multimodal"
    ),
    "Qwen2VLForConditionalGeneration": "qwen_vl:Qwen2VL",
    "Qwen2_5_VLForConditionalGeneration": "qwen_vl:Qwen2VL",
    "Qwen3ASRForConditionalGeneration": "chunked_audio:Qwen3Asr",
    "Qwen3OmniMoeForConditionalGeneration": "omni:Qwen3Omni",
    "Qwen3VLForConditionalGeneration": "qwen_vl:Qwen3VL",
    "Qwen3VLForSequenceClassification": "qwen_vl:Qwen3VL",
    "Qwen3VLMoeForConditionalGeneration": "qwen_vl:Qwen3VL",
    "Qwen3_5ForConditionalGeneration": "qwen_vl:Qwen35",
    "Qwen3_5MoeForConditionalGeneration": "qwen_vl:Qwen35",
    "SmolVLMForConditionalGeneration": "smolvlm:SmolVLM",
    "UltravoxModel": "ultravox:Ultravox",
    "VoxtralForConditionalGeneration": "whisper_like:Voxtral",
}
"""Architecture → module and class."""


@hookimpl
def register_media_models(registry: Any) -> None:
    for architecture, reference in MODELS.items():
        registry.add(architecture, f"jackfield.plugins.media.{reference}")
    registry.add("*", "jackfield.plugins.media.fallback:Fallback")

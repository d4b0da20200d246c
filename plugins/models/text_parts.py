"""Multimodal architectures whose text part is served."""

from __future__ import annotations

BY_TYPE = (
    "Apertus1p5ForConditionalGeneration", "AriaForConditionalGeneration",
    "AudioFlamingo3ForConditionalGeneration", "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration", "DeepseekVLForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration", "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "GlmAsrForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "HCXVisionForCausalLM", "HCXVisionV2ForCausalLM",
    "HyperCLOVAXVisionV2ForConditionalGeneration", "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration", "InternVLChatModel", "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration", "KimiVLForConditionalGeneration",
    "Lfm2VlForConditionalGeneration", "LightOnOcrForConditionalGeneration",
    "LightOnOCRForConditionalGeneration", "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration", "Mistral3ForConditionalGeneration",
    "Ovis2ForConditionalGeneration", "PaliGemmaForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration", "SmolVLMForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration", "VideoLlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration", "VoxtralForConditionalGeneration",
)  # fmt: skip
"""Served by the architecture or type that the text configuration states."""
TEXT_PARTS = {
    **dict.fromkeys(BY_TYPE, ""),
    "DeepseekOcr2ForConditionalGeneration": "DeepseekOcr2TextForCausalLM",
    "Glm4vForConditionalGeneration": "Glm4ForCausalLM",
    "GlmOcrForConditionalGeneration": "GlmOcrTextForCausalLM",
    "Glm4vMoeForConditionalGeneration": "Glm4MoeForCausalLM",
    **dict.fromkeys(
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        "DeepseekV3ForCausalLM",
    ),
    "MiniMaxM3SparseForConditionalGeneration": "MiniMaxM3SparseForCausalLM",
    "Phi4MultimodalForCausalLM": "Phi3ForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5OmniForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5OmniModel": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3VLMoeTextForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLForSequenceClassification": "Qwen3ForSequenceClassification",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeTextForCausalLM",
    "Step3VLForConditionalGeneration": "Step3TextForCausalLM",
}
"""Architecture → that of its text part."""

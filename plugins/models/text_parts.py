"""Multimodal architectures whose text part is served."""

from __future__ import annotations

BY_TYPE = (
    "AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration", "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "GotOcr2ForConditionalGeneration", "HCXVisionForCausalLM", "HCXVisionV2ForCausalLM",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration", "InternVLChatModel", "KimiVLForConditionalGeneration",
    "Lfm2VlForConditionalGeneration", "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration", "Mistral3ForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration", "SmolVLMForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)  # fmt: skip
"""Served by the architecture that the text configuration names, or has the type of."""
TEXT_PARTS = {
    **dict.fromkeys(BY_TYPE, ""),
    "Glm4vForConditionalGeneration": "Glm4ForCausalLM",
    "Glm4vMoeForConditionalGeneration": "Glm4MoeForCausalLM",
    **dict.fromkeys(
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        "DeepseekV3ForCausalLM",
    ),
    "MiniMaxM3SparseForConditionalGeneration": "MiniMaxM3SparseForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeTextForCausalLM",
    "Step3VLForConditionalGeneration": "Step3TextForCausalLM",
}
"""Architecture → that of its text part."""

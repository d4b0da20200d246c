"""Multimodal architectures whose text part is served."""

from __future__ import annotations

BY_TYPE = (
    "Apertus1p5ForConditionalGeneration", "AriaForConditionalGeneration",
    "AudioFlamingo3ForConditionalGeneration", "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration", "DeepseekVLForConditionalGeneration",
    "DeepseekOCRForCausalLM", "DeepseekOcr2ForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "GlmAsrForConditionalGeneration",
    "Glm46VForConditionalGeneration", "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration", "GlmOcrForConditionalGeneration",
    "GotOcr2ForConditionalGeneration", "GraniteSpeechForConditionalGeneration",
    "HCXVisionForCausalLM", "HCXVisionV2ForCausalLM",
    "HyperCLOVAXVisionV2ForConditionalGeneration", "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration", "InternVLChatModel", "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration", "KimiVLForConditionalGeneration",
    "Lfm2VlForConditionalGeneration", "LightOnOcrForConditionalGeneration",
    "LightOnOCRForConditionalGeneration", "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
    "MiniCPMO", "MiniCPMV", "MiniCPMV4_6ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Ovis2ForConditionalGeneration", "PaddleOCRVLForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration", "Qwen2VLForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration", "SmolVLMForConditionalGeneration",
    "Step3VLForConditionalGeneration", "UltravoxModel",
    "VideoLlama3ForConditionalGeneration", "VideoLlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration", "VoxtralForConditionalGeneration",
)  # fmt: skip
"""Served by the architecture or type that the text configuration states."""
TEXT_PARTS = {
    **dict.fromkeys(BY_TYPE, ""),
    **dict.fromkeys(
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        "DeepseekV3ForCausalLM",
    ),
    "ColPaliForRetrieval": "ColPaliTextModel",
    "ColQwen2ForRetrieval": "ColQwen2TextModel",
    "Phi3VForCausalLM": "Phi3ForCausalLM",
    "Phi4MMForCausalLM": "Phi4MMTextForCausalLM",
    "Phi4MultimodalForCausalLM": "Phi3ForCausalLM",
    "Qwen3VLForSequenceClassification": "Qwen3ForSequenceClassification",
}
"""Architecture → that of its text part, whatever its text configuration says; "": what that
says."""
TEXT_TYPES = {
    "deepseek_ocr2_text": "DeepseekOcr2TextForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm_ocr_text": "GlmOcrTextForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3SparseForCausalLM",
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), "Qwen2ForCausalLM"),
    "paddleocr_vl_text": "PaddleOCRTextForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    **dict.fromkeys(("qwen3_omni_moe_text", "qwen3_vl_moe_text"), "Qwen3VLMoeTextForCausalLM"),
    "step3_text": "Step3TextForCausalLM",
}
"""Type of a text configuration that is of multimodal checkpoints alone → architecture."""

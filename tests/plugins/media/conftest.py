"""Which families of models are preempted, meet pictures again, are recorded, and read videos, by
day."""

from __future__ import annotations

import pytest

BY_DAY = (
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
)
"""Windows, chunks, recordings, positions of three axes with rows for inner layers, and states: what
the engine tells apart. What a family itself computes is compared for each, every day."""
OF_THE_ENGINE = (
    "test_preempted_prompts_are_encoded_and_placed_again",
    "test_the_prefix_cache_knows_pictures_by_content",
)
PREEMPTED = (OF_THE_ENGINE[0], "Gemma3ForConditionalGeneration", "Qwen3_5ForConditionalGeneration")
"""Those that give blocks back, and states that are computed again."""
PROMPTS = "test_each_prompt_says_what_transformers_says"
OF_THE_TOWER = (
    "test_each_embedded_token_has_a_row",
    "test_items_together_are_encoded_as_alone",
    "test_recorded_encodings_give_what_launched_ones_give",
)
RECORDED = "test_recorded_encodings_give_what_launched_ones_give"
TOWERS = (
    "DeepseekOcr2ForConditionalGeneration", "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration", "GlmOcrForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration", "Idefics3ForConditionalGeneration",
    "InternVLChatModel", "InternVLForConditionalGeneration", "Kimi_K25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration", "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration", "MiniCPMV",
    "Mistral3ForConditionalGeneration", "PaliGemmaForConditionalGeneration", "Phi3VForCausalLM",
    "Qwen2AudioForConditionalGeneration", "Qwen2VLForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration", "Qwen3VLForConditionalGeneration", "UltravoxModel",
    "VoxtralForConditionalGeneration",
)  # fmt: skip
"""Families whose towers are recorded by day; others have one of these, or its parts."""
AS_ANOTHER = ("DeepseekOCRForCausalLM", "Phi4MMForCausalLM")
"""Large towers that DeepSeek-OCR 2 and Phi 4 by its other name have, too."""
OF_VIDEOS = (
    "test_frames_of_a_file_are_chosen_and_decoded_in_a_process",
    "test_videos_of_codecs_are_read_with_av",
)
READ_BY_DAY = ("Glm46VForConditionalGeneration", "Qwen3VLForConditionalGeneration")
"""Whose frames are chosen in two ways; files are decoded in the same way for all."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark the others as slow, and of each family's prompts all or the few that are not its own."""
    for item in items:
        name, _, of = item.name.partition("[")
        family, _, cases = of.rstrip("]").partition("-")
        by_day = family in BY_DAY
        if (name in OF_THE_ENGINE and not by_day) or (
            name == PROMPTS and cases == ("few" if by_day else "all")
        ):
            item.add_marker(pytest.mark.slow)
        if name == PREEMPTED[0] and family not in PREEMPTED:
            item.add_marker(pytest.mark.slow)
        if name in OF_VIDEOS and family not in READ_BY_DAY:
            item.add_marker(pytest.mark.slow)
        if name == RECORDED and getattr(item.cls, "family", family) not in TOWERS:
            item.add_marker(pytest.mark.slow)
        if name in OF_THE_TOWER and getattr(item.cls, "family", None) in AS_ANOTHER:
            item.add_marker(pytest.mark.slow)

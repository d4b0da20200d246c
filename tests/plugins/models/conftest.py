"""Which splits of a prompt, and how many ranks, each family of models is tried with by day."""

from __future__ import annotations

import pytest

from jackfield.plugins.conformance.models import ModelKit

SPLIT = "test_any_split_of_the_prompt_gives_the_same_logits["
BY_DAY = ("1-1-1-1-1-1-1]", "4-4-1-30-2-16-6]")
"""Token by token, and in parts of all sizes."""
BY_NIGHT = (
    "test_a_missing_tensor_is_refused_by_name",
    "test_builds_and_runs_in_every_dtype[float32]",
    "test_greedy_tokens_equal_the_reference[whole-prompts]",
    "test_ranks_compute_together_what_one_does[2]",
    "test_stages_compute_one_after_another_what_one_rank_does[2]",
)
"""What is less than the other case of the same test, what all others do, or what is the loader's
and not the family's."""
OF_PARTS = (
    "test_a_prefix_hit_gives_the_same_answer",
    "test_adapters_change_layers_as_in_the_reference",
    "test_any_split_of_the_prompt_gives_the_same_logits[1-1-1-1-1-1-1]",
    "test_every_tensor_of_the_checkpoint_reaches_a_parameter",
    "test_greedy_tokens_equal_the_reference",
    "test_other_weights_take_the_place_of_the_first",
    "test_ranks_compute_together_what_one_does[4]",
    "test_stages_compute_one_after_another_what_one_rank_does",
    "test_the_batch_changes_no_bit",
    "test_what_else_is_in_the_batch_changes_nothing",
)
OWN_PARTS = (
    "DeepseekV3ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "Phi3ForCausalLM",
    "Qwen2MoeForCausalLM",
)  # fmt: skip
"""Latents, windows, sinks, tensors that are several in one, and experts with shared ones: others
are made of these and of what the first family of a file has."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the others as slow, but for the first family of a file."""
    first: dict[object, object] = {}
    for item in items:
        kit = getattr(item, "cls", None)
        if kit is None or not issubclass(kit, ModelKit):
            continue
        if first.setdefault(item.path, kit) is kit:
            continue
        split = item.name.startswith(SPLIT) and not item.name.endswith(BY_DAY)
        of_parts = item.name.startswith(OF_PARTS) and kit.name not in OWN_PARTS
        if split or of_parts or item.name in BY_NIGHT:
            item.add_marker(pytest.mark.slow)

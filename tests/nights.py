"""Which of a test's cases run by day; `make test-nightly` runs all.

A file marks its own as `slow`, mostly, and the `conftest.py` of a directory those of kits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest


def some_by_day(cases: Iterable[Any], day: Collection[Any]) -> list[Any]:
    """Parametrize with all of them; those that are not in `day` are slow.

    day: has each value of each parameter, and each branch, once; what is left out combines them.
    """
    params, unmarked = [], 0
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        unmarked += case in day
        params.append(pytest.param(*values, marks=() if case in day else pytest.mark.slow))
    assert unmarked == len(day), f"one of {day} is no case"
    return params


REPEATS: dict[str, tuple[str, ...]] = {
    "core/engine/test_batch_invariance.py": ("test_batches_do_not_change_a_bit[llama]",),
    "core/engine/test_failed_steps.py": (
        "test_transfers_of_failed_steps_and_of_those_not_run_come_to_their_end[has_loads]",
    ),
    "core/engine/test_output_failures.py": (
        "test_an_error_with_one_requests_output_ends_it_alone[OutputText-push_token-error]",
    ),
    "core/engine/test_parity.py": (
        "test_triton_backend_equals_transformers[qwen3-moe-selection1-3]",
    ),
    "core/engine/test_pooling.py": (
        "test_classifiers_give_the_logits_of_transformers[Bert-1]",
        "test_classifiers_give_the_logits_of_transformers[Gte-1]",
        "test_classifiers_give_the_logits_of_transformers[NomicBert-1]",
        "test_classifiers_give_the_logits_of_transformers[Roberta-1]",
        "test_classifiers_give_the_logits_of_transformers[XLMRoberta-1]",
        "test_decoders_are_pooled_over_chunks[ForCausalLM-Gemma]",
        "test_decoders_are_pooled_over_chunks[ForCausalLM-Glm4]",
        "test_decoders_are_pooled_over_chunks[ForCausalLM-Llama]",
        "test_decoders_are_pooled_over_chunks[ForCausalLM-Olmo2]",
        "test_decoders_are_pooled_over_chunks[ForCausalLM-Phi3]",
        "test_decoders_are_pooled_over_chunks[ForCausalLM-Qwen2]",
        "test_decoders_are_pooled_over_chunks[ForCausalLM-Qwen3]",
        "test_decoders_with_a_classifier[Gemma]",
        "test_decoders_with_a_classifier[Glm4]",
        "test_decoders_with_a_classifier[Mistral]",
        "test_decoders_with_a_classifier[Olmo2]",
        "test_decoders_with_a_classifier[Olmo3]",
        "test_decoders_with_a_classifier[Phi3]",
        "test_decoders_with_a_classifier[Qwen2]",
    ),
    "core/engine/test_routed_experts.py": ("test_experts_are_those_that_routers_choose[mixtral]",),
    "core/live/test_mapped_memory.py": ("test_an_engine_says_the_same_after_each_sleep[llama]",),
    "core/live/test_weight_updates.py": (
        "test_after_an_update_an_engine_says_what_a_fresh_one_does[by_packed_group-options8]",
        "test_after_an_update_an_engine_says_what_a_fresh_one_does[by_tensors-options7]",
        "test_every_layout_is_that_of_a_fresh_engine[llama-options4]",
        "test_every_layout_is_that_of_a_fresh_engine[qwen3-moe-options1]",
    ),
    "core/loading/test_config_fields.py": ("test_no_value_of_any_field_is_a_bare_error[llama]",),
    "core/parallel/test_pipeline.py": (
        "test_stages_serve_the_tokens_of_one_rank[gemma3-3-1-options3]",
        "test_stages_serve_the_tokens_of_one_rank[gemma3n-3-1-options7]",
        "test_stages_serve_the_tokens_of_one_rank[qwen3-2-1-options0]",
        "test_stages_take_what_one_rank_takes[qwen3-1-{'quantization': 'int8'}]",
        "test_stages_take_what_one_rank_takes[qwen3-moe-2-{'enable_expert_parallel': True}]",
    ),
    "core/parallel/test_worker_ranks.py": (
        "test_ranks_quantize_the_heads_that_they_have[int8]",
        "test_two_ranks_serve_the_tokens_of_one[olmo2]",
        "test_two_ranks_serve_the_tokens_of_one[qwen3-moe]",
        "test_two_ranks_serve_the_tokens_of_one[qwen3]",
    ),
    "core/scheduling/test_adapters.py": ("test_random_steps[AdapterConnectorMachine]",),
    "core/scheduling/test_compression_state_machine.py": (
        "test_random_steps[CompactingDraftsInWindowsMachine]",
        "test_random_steps[LeveledConnectorMachine]",
        "test_random_steps[LeveledDraftsMachine]",
        "test_random_steps[PressedLevelsMachine]",
        "test_random_steps[PressedWindowsMachine]",
    ),
    "core/scheduling/test_draft_widths.py": (
        "test_it_is_about_as_fast_as_the_best_width[0.4-32]",
        "test_it_is_about_as_fast_as_the_best_width[0.8-8]",
        "test_the_search_for_drafts_that_never_pay_rests[256]",
    ),
    "core/worker/test_cache_groups.py": (
        "test_replayed_steps_give_the_same[gemma3]",
        "test_tokens_are_the_same[mistral-window]",
    ),
    "core/worker/test_drafts_of_all_rows.py": (
        "test_a_row_with_drafts_asks_for[a grammar with min_tokens]",
        "test_a_row_with_drafts_asks_for[a processor of a greedy row]",
        "test_a_row_with_drafts_asks_for[all logprobs]",
        "test_a_row_with_drafts_asks_for[allowed]",
        "test_a_row_with_drafts_asks_for[grammar choice]",
        "test_a_row_with_drafts_asks_for[logit_bias]",
        "test_a_row_with_drafts_asks_for[negative frequency]",
        "test_a_row_with_drafts_asks_for[presence and frequency]",
        "test_mixes_of_rows_give_the_tokens_of_an_engine_without_drafts[windows]",
    ),
    "core/worker/test_graphs.py": ("test_replayed_steps_equal_launched_ones[whole]",),
    "core/worker/test_kv_compression.py": (
        "test_tokens_are_those_of_dense_attention_to_what_is_left[triton-SnapKV-3-auto]",
    ),
    "core/worker/test_kv_levels.py": (
        "test_tokens_are_those_of_a_cache_that_is_rounded_and_cut_by_hand[torch-16:1.0@0",
        "test_tokens_are_those_of_a_cache_that_is_rounded_and_cut_by_hand[torch-4:0.5@24-levels2-key_norm-36-0]",
    ),
    "core/worker/test_latent_graphs.py": ("test_recorded_steps_equal_launched_ones[DeepseekV2]",),
    "core/worker/test_mixed_graphs.py": (
        "test_a_graph_that_steps_go_without_is_recorded_in_traffic[False]",
    ),
    "core/worker/test_rejection.py": (
        "test_tokens_have_the_targets_distribution[bias]",
        "test_tokens_have_the_targets_distribution[penalties]",
        "test_tokens_have_the_targets_distribution[top_k]",
        "test_tokens_have_the_targets_distribution[top_p]",
    ),
    "core/worker/test_sampler.py": (
        "test_any_mix_of_rows_matches_the_oracle[23-dtype1-64-8",
        "test_any_mix_of_rows_matches_the_oracle[301-dtype2-16777216",
    ),
    "core/worker/test_sampling_kernels.py": (
        "test_any_mix_of_rows_gets_the_tokens_of_torch[3001-dtype4",
        "test_any_mix_of_rows_gets_the_tokens_of_torch[301-dtype1",
    ),
    "core/worker/test_source_graphs.py": ("test_recorded_steps_equal_launched_ones[bart]",),
    "core/worker/test_speculation.py": (
        "test_compacted_caches_give_the_same_tokens[gemma3-key_norm]",
        "test_greedy_tokens_are_the_same[gemma3]",
        "test_greedy_tokens_are_the_same[llama4]",
        "test_greedy_tokens_are_the_same[qwen3]",
    ),
    "core/worker/test_structured_engine.py": ("test_recorded_steps_give_what_launched_ones_give",),
    "core/worker/test_suffix_drafts.py": (
        "test_ranks_propose_alike[ranks]",
        "test_tokens_are_the_same[qwen3]",
    ),
    "entrypoints/bench/test_load.py": ("test_a_closed_loop_keeps_so_many_open_and_no_more[3]",),
    "entrypoints/test_chat_fields.py": (
        "test_a_folded_stream_is_the_whole_answer[logprobs]",
        "test_a_folded_stream_is_the_whole_answer[named]",
        "test_a_folded_stream_is_the_whole_answer[schema]",
        "test_a_folded_stream_is_the_whole_answer[several]",
        "test_a_folded_stream_is_the_whole_answer[thought]",
        "test_a_tool_loop_of_several_turns[async]",
        "test_a_tool_loop_of_several_turns[sync]",
        "test_strict_schemas_hold_for_every_seed[named]",
        "test_strict_schemas_hold_for_every_seed[required]",
        "test_the_synchronous_client_folds_the_same[tools]",
    ),
    "entrypoints/test_chat_speech.py": ("test_texts_are_those_of_transformers[GraniteSpeech]",),
    "entrypoints/test_constrained_calls.py": (
        "test_a_forced_call_cut_off_anywhere_leaves_no_markup[hermes-choice1]",
        "test_a_forced_call_cut_off_anywhere_leaves_no_markup[qwen3_coder-required]",
        "test_a_named_tool_is_called_once[hermes]",
        "test_an_answer_follows_a_schema_or_calls_a_tool[hermes]",
        "test_required_calls_are_json_if_the_form_cannot_express_them[hermes-options2]",
        "test_required_calls_follow_their_schemas[qwen3_coder]",
        "test_responses_hold_calls_the_same_way[qwen3_coder]",
        "test_special_tokens_open_constrained_calls[auto]",
        "test_strict_tools_are_constrained_when_the_model_calls_them[hermes]",
    ),
    "entrypoints/test_exact_counts.py": (
        "test_a_stream_counts_all_its_tokens[False-/v1/chat/completions-body5",
        "test_a_stream_counts_all_its_tokens[False-/v1/chat/completions-body7",
        "test_a_stream_counts_all_its_tokens[False-/v1/completions-body1",
        "test_a_stream_counts_all_its_tokens[False-/v1/completions-body3",
        "test_a_stream_counts_all_its_tokens[False-/v1/completions-body4",
    ),
    "entrypoints/test_large_responses.py": (
        "test_log_probabilities_of_a_request_are_bounded_in_sum[/v1/chat/completions-fits1",
    ),
    "entrypoints/test_responses.py": (
        "test_a_required_call_is_made_for_every_seed[named]",
        "test_a_required_call_is_made_for_every_seed[required]",
        "test_the_effort_reaches_the_template[high-True high]",
        "test_the_effort_reaches_the_template[minimal-True low]",
    ),
    "entrypoints/test_structured_outputs.py": ("test_a_named_tool_is_called_for_every_seed",),
    "entrypoints/test_waiting_limit.py": ("test_goodput_stays_at_five_times_capacity[few slots]",),
    "examples/test_part_packages.py": (
        "test_a_group_gets_its_budget[1-drafts]",
        "test_a_group_gets_its_budget[2-plain]",
        "test_a_group_gets_its_budget[37-plain]",
    ),
    "kernels/test_adapter_kernels.py": ("test_chunks_that_are_made_late_are_waited_for[5]",),
    "kernels/test_expert_kernels.py": (
        "test_experts_without_gates_equal_their_twin[fp8-(1, 16, 8, 64, 32)]",
        "test_experts_without_gates_equal_their_twin[int8-(1, 16, 8, 64, 32)]",
    ),
    "kernels/test_move_levels.py": (
        "test_it_equals_its_twin[False-keys and values]",
        "test_it_equals_its_twin[False-of an odd width]",
        "test_it_equals_its_twin[True-a latent's groups]",
    ),
    "plugins/adapters/test_peft.py": (
        "test_logits_are_those_of_peft[DoRA with biases]",
        "test_logits_are_those_of_peft[no power of two, rsLoRA]",
        "test_logits_are_those_of_peft[patterns, rsLoRA]",
        "test_logits_are_those_of_peft[seven linears]",
    ),
    "plugins/adapters/test_served_adapters.py": (
        "test_every_kind_of_adapter_gives_pefts_tokens_in_one_batch[qwen2]",
    ),
    "plugins/conformance/test_operations_kit.py": (
        "TestTriton::test_add_adapters[float16-40]",
        "TestTriton::test_add_adapters[float16-4]",
    ),
    "plugins/executors/test_ranks.py": (
        "test_kv_compression_drops_the_same_tokens[{'kv_compression_ratio': 0.5}]",
        "test_windows_are_compacted_on_two_ranks[key_norm]",
    ),
    "plugins/kv_connectors/test_kv_connector_kits.py": (
        "TestCpuOffload::test_random_traffic_gives_the_tokens_of_an_engine_without[1]",
        "TestFileStore::test_random_traffic_gives_the_tokens_of_an_engine_without[1]",
        "TestMulti::test_a_far_side_that_breaks_costs_a_recompute",
        "TestMulti::test_an_abort_during_a_load_leaves_its_blocks_alone_until_it_ends",
        "TestMulti::test_another_salt_finds_nothing",
        "TestMulti::test_blocks_are_not_reused_while_a_save_reads_them",
        "TestMulti::test_engines_at_once_on_one_store",
        "TestMulti::test_others_go_on_while_a_load_takes_its_time",
        "TestMulti::test_partial_hits_end_at_block_borders",
        "TestMulti::test_random_traffic_gives_the_tokens_of_an_engine_without[1]",
        "TestMulti::test_what_is_damaged",
    ),
    "plugins/models/test_compacted_families.py": (
        "test_attention_layers_are_compacted_beside_states[Qwen3NextForCausalLM-snap_kv-more1]",
    ),
    "plugins/models/test_fallback.py": (
        "test_decode_steps_are_recorded[DeepseekV3ForCausalLM]",
        "test_ranks_compute_together_what_one_does[OlmoeForCausalLM]",
        "test_requests_share_steps_chunks_prefixes_and_blocks[BitNetForCausalLM-14]",
        "test_requests_share_steps_chunks_prefixes_and_blocks[FlintForCausalLM-26]",
    ),
    "plugins/models/test_gemma.py": ("test_kernels_equal_transformers[gemma3]",),
    "plugins/models/test_latent_families.py": (
        "test_kernels_equal_transformers[LongcatFlashForCausalLM]",
    ),
    "plugins/models/test_leveled_families.py": (
        "test_attention_layers_have_levels_beside_states[Qwen3NextForCausalLM]",
        "test_latents_have_levels[torch-8:0.7@12,4:0.4@30-key_norm-20-DeepseekV3ForCausalLM]",
        "test_latents_have_levels[torch-8@16,4@40-None-20-DeepseekV2ForCausalLM]",
        "test_latents_have_levels[triton-8:0.7@12,4:0.4@30-snap_kv-4-DeepseekV3ForCausalLM]",
        "test_layers_that_see_all_have_levels_beside_windows[gpt-oss]",
    ),
    "plugins/models/test_state_families.py": ("test_stages_keep_the_states_of_their_layers[3]",),
    "plugins/models/test_text_parts.py": (
        "test_a_text_part_equals_the_whole_without_images[Ovis2ForConditionalGeneration]",
    ),
    "plugins/models/test_timestamp_rules.py": ("test_tokens_are_those_of_transformers[plain]",),
    "plugins/operations/test_without_triton.py": ("test_a_refusal_names_what_is_missing[triton]",),
    "plugins/parsers/test_think_tags_and_hermes.py": (
        "test_any_cutting_gives_the_same_fold[not thinking]",
        "test_any_cutting_gives_the_same_fold[thinking]",
    ),
}
"""Whose lines and branches another case of the same test, which runs by day, covers too: a second
family, backend, seed or number. By file and the beginning of the name."""


TESTS = Path(__file__).resolve().parent


def mark_repeats(items: Iterable[pytest.Item]) -> None:
    """Mark REPEATS as slow."""
    for item in items:
        if item.path.is_relative_to(TESTS):
            names = REPEATS.get(item.path.relative_to(TESTS).as_posix(), ())
            if names and item.nodeid.partition("::")[2].startswith(names):
                item.add_marker(pytest.mark.slow)

"""Which of a test's cases run by day; `make test-nightly` runs all.

A file marks its own as `slow`, mostly, and the `conftest.py` of a directory those of kits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
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
    "core/engine/test_input_session.py": (
        "test_each_input_follows_all_that_came_before[cumulative]",
    ),
    "core/engine/test_jobs.py": ("test_the_executor_says_how_many_steps_are_in_flight[3]",),
    "core/engine/test_output_failures.py": (
        "test_an_error_with_one_requests_output_ends_it_alone[EngineMetrics-observe_first_token",
        "test_an_error_with_one_requests_output_ends_it_alone[OutputText-push_token-error]",
        "test_an_error_with_one_requests_output_ends_it_alone[StopStrings",
    ),
    "core/engine/test_parity.py": (
        "test_greedy_tokens_and_logprobs_equal_transformers[llama-tiny cache]",
        "test_greedy_tokens_and_logprobs_equal_transformers[mistral-window-tiny cache]",
        "test_greedy_tokens_and_logprobs_equal_transformers[qwen3-moe-tiny cache]",
        "test_triton_backend_equals_transformers[qwen3-moe-selection1-3]",
    ),
    "core/engine/test_pooling.py": (
        "test_a_mean_over_chunks_survives_preemption[CLS]",
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
    "core/live/test_quiesce.py": ("test_keep_lets_requests_go_on_afterwards[True]",),
    "core/live/test_weight_updates.py": (
        "test_after_an_update_an_engine_says_what_a_fresh_one_does[by_packed_group-options8]",
        "test_after_an_update_an_engine_says_what_a_fresh_one_does[by_tensors-options7]",
        "test_every_layout_is_that_of_a_fresh_engine[llama-options4]",
        "test_every_layout_is_that_of_a_fresh_engine[qwen3-moe-options1]",
    ),
    "core/loading/test_checkpoint_config.py": (
        "test_with_any_one_value_odd_the_outcome_stays_that_of_transformers[minilm]",
        "test_with_any_one_value_odd_the_outcome_stays_that_of_transformers[mistral-7b]",
        "test_with_any_one_value_odd_the_outcome_stays_that_of_transformers[qwen2 yarn]",
        "test_with_any_one_value_odd_the_outcome_stays_that_of_transformers[qwen3 reranker]",
        "test_with_any_one_value_odd_the_outcome_stays_that_of_transformers[qwen3-30b-a3b]",
        "test_with_any_one_value_odd_the_outcome_stays_that_of_transformers[qwen3-8b]",
        "test_with_any_one_value_odd_the_outcome_stays_that_of_transformers[reranker]",
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
    "core/remote/test_remote_engine.py": (
        "test_a_malformed_frame_ends_its_connection_and_not_the_engine[another first]",
        "test_a_malformed_frame_ends_its_connection_and_not_the_engine[hello twice]",
        "test_an_error_with_one_requests_output_ends_it_alone[params1]",
    ),
    "core/scheduling/test_adapters.py": (
        "test_random_steps[AdapterConnectorMachine]",
        "test_random_steps[AdapterMachine]",
    ),
    "core/scheduling/test_compression_state_machine.py": (
        "test_random_steps[CompactingDraftsInWindowsMachine]",
        "test_random_steps[LeveledConnectorMachine]",
        "test_random_steps[LeveledDraftsMachine]",
        "test_random_steps[PressedLevelsMachine]",
        "test_random_steps[PressedWindowsMachine]",
    ),
    "core/scheduling/test_draft_state_machine.py": (
        "test_random_steps[DraftsInOneWindowMachine]",
        "test_random_steps[OneTokenBlocksMachine]",
        "test_random_steps[PaddedDraftMachine]",
    ),
    "core/scheduling/test_draft_widths.py": (
        "test_it_is_about_as_fast_as_the_best_width[0.4-32]",
        "test_it_is_about_as_fast_as_the_best_width[0.8-8]",
        "test_the_search_for_drafts_that_never_pay_rests[256]",
    ),
    "core/scheduling/test_input_embeds.py": ("test_random_steps[MediaMachine]",),
    "core/scheduling/test_micro_batches.py": (
        "test_random_traffic_ends[1]",
        "test_random_traffic_ends[3]",
        "test_random_traffic_ends[4]",
    ),
    "core/scheduling/test_pacing_simulator.py": (
        "test_the_simulation_says_what_was_measured[33.7]",
    ),
    "core/scheduling/test_sources.py": ("test_random_steps[SourceMachine]",),
    "core/worker/test_cache_groups.py": (
        "test_replayed_steps_give_the_same[gemma3]",
        "test_tokens_are_the_same[mistral-window]",
    ),
    "core/worker/test_drafts_of_all_rows.py": (
        "test_a_row_with_drafts_asks_for[a grammar after its end]",
        "test_a_row_with_drafts_asks_for[a grammar with min_tokens]",
        "test_a_row_with_drafts_asks_for[a processor of a greedy row]",
        "test_a_row_with_drafts_asks_for[all logprobs]",
        "test_a_row_with_drafts_asks_for[allowed]",
        "test_a_row_with_drafts_asks_for[grammar choice]",
        "test_a_row_with_drafts_asks_for[grammar json_object]",
        "test_a_row_with_drafts_asks_for[logit_bias]",
        "test_a_row_with_drafts_asks_for[negative frequency]",
        "test_a_row_with_drafts_asks_for[presence and frequency]",
        "test_a_row_with_drafts_asks_for[repetition]",
        "test_mixes_of_rows_give_the_tokens_of_an_engine_without_drafts[windows]",
        "test_what_a_grammar_forces_is_a_draft[llguidance-1]",
    ),
    "core/worker/test_graphs.py": ("test_replayed_steps_equal_launched_ones[whole]",),
    "core/worker/test_kv_compression.py": (
        "test_a_budget_at_or_above_the_length_compacts_nothing[rule1]",
        "test_a_budget_at_or_above_the_length_compacts_nothing[rule2]",
        "test_keeping_all_in_fresh_blocks_changes_no_token[17]",
        "test_keeping_all_in_fresh_blocks_changes_no_token[20]",
        "test_later_tokens_of_a_prompt_attend_to_what_is_left[torch-SnapKV",
        "test_tokens_are_those_of_dense_attention_to_what_is_left[torch-RKV-10-int8_int4]",
        "test_tokens_are_those_of_dense_attention_to_what_is_left[triton-SnapKV-3-auto]",
    ),
    "core/worker/test_kv_formats.py": (
        "test_it_is_the_model_with_rounded_keys_and_values[glm4",
        "test_it_is_the_model_with_rounded_keys_and_values[gpt-oss",
        "test_what_a_connector_brings_back_is_what_was_stored[int4]",
        "test_what_a_connector_brings_back_is_what_was_stored[int8]",
    ),
    "core/worker/test_kv_levels.py": (
        "test_tokens_are_those_of_a_cache_that_is_rounded_and_cut_by_hand[torch-16:1.0@0",
        "test_tokens_are_those_of_a_cache_that_is_rounded_and_cut_by_hand[torch-4:0.5@24-levels2-key_norm-36-0]",
    ),
    "core/worker/test_latent_graphs.py": ("test_recorded_steps_equal_launched_ones[DeepseekV2]",),
    "core/worker/test_launches.py": (
        "test_recorded_steps_launch_these_kernels_and_no_more[window]",
    ),
    "core/worker/test_logprobs_mode.py": (
        "test_numbers_are_of_the_kind_that_is_asked_for[processed_logits]",
        "test_numbers_are_of_the_kind_that_is_asked_for[raw_logits]",
    ),
    "core/worker/test_mixed_graphs.py": (
        "test_a_graph_that_steps_go_without_is_recorded_in_traffic[False]",
    ),
    "core/worker/test_processors.py": (
        "test_wrong_logits_cost_the_processors_own_requests_alone[one row]",
        "test_wrong_logits_cost_the_processors_own_requests_alone[resized]",
    ),
    "core/worker/test_rejection.py": (
        "test_tokens_have_the_targets_distribution[bias]",
        "test_tokens_have_the_targets_distribution[min_p]",
        "test_tokens_have_the_targets_distribution[penalties]",
        "test_tokens_have_the_targets_distribution[top_k]",
        "test_tokens_have_the_targets_distribution[top_p]",
    ),
    "core/worker/test_sampler.py": (
        "test_a_seeded_request_is_the_same_in_any_company[params2",
        "test_a_seeded_request_is_the_same_in_any_company[params4",
        "test_a_seeded_request_is_the_same_in_any_company[params6",
        "test_a_seeded_request_is_the_same_in_any_company[params7",
        "test_any_mix_of_rows_matches_the_oracle[23-dtype0-16777216",
        "test_any_mix_of_rows_matches_the_oracle[23-dtype1-64-8",
        "test_any_mix_of_rows_matches_the_oracle[301-dtype2-16777216",
    ),
    "core/worker/test_sampling_kernels.py": (
        "test_any_mix_of_rows_gets_the_tokens_of_torch[23-dtype0",
        "test_any_mix_of_rows_gets_the_tokens_of_torch[3001-dtype3",
        "test_any_mix_of_rows_gets_the_tokens_of_torch[3001-dtype4",
        "test_any_mix_of_rows_gets_the_tokens_of_torch[301-dtype1",
    ),
    "core/worker/test_shared_prefixes.py": (
        "test_rows_that_come_and_go_share_what_their_prompts_have_in_common[launched]",
    ),
    "core/worker/test_source_graphs.py": ("test_recorded_steps_equal_launched_ones[bart]",),
    "core/worker/test_speculation.py": (
        "test_compacted_caches_give_the_same_tokens[gemma3-key_norm]",
        "test_greedy_tokens_are_the_same[gemma3]",
        "test_greedy_tokens_are_the_same[llama4]",
        "test_greedy_tokens_are_the_same[qwen3]",
        "test_no_speculator_changes_the_tokens[outside]",
        "test_no_speculator_changes_the_tokens[padding]",
    ),
    "core/worker/test_structured_engine.py": ("test_recorded_steps_give_what_launched_ones_give",),
    "core/worker/test_suffix_drafts.py": (
        "test_ranks_propose_alike[ranks]",
        "test_tokens_are_the_same[qwen3]",
    ),
    "core/worker/test_text_beside_media.py": (
        "test_text_alone_launches_what_its_text_part_launches[Qwen2VL]",
    ),
    "entrypoints/bench/test_load.py": ("test_a_closed_loop_keeps_so_many_open_and_no_more[3]",),
    "entrypoints/test_adapters_api.py": (
        "test_each_route_takes_an_adapter_and_knows_no_other_name[/api/generate]",
        "test_each_route_takes_an_adapter_and_knows_no_other_name[/v1/messages/count_tokens]",
    ),
    "entrypoints/test_chat_fields.py": (
        "test_a_folded_stream_is_the_whole_answer[answer]",
        "test_a_folded_stream_is_the_whole_answer[logprobs]",
        "test_a_folded_stream_is_the_whole_answer[named]",
        "test_a_folded_stream_is_the_whole_answer[required]",
        "test_a_folded_stream_is_the_whole_answer[schema]",
        "test_a_folded_stream_is_the_whole_answer[several]",
        "test_a_folded_stream_is_the_whole_answer[thought]",
        "test_a_tool_loop_of_several_turns[async]",
        "test_a_tool_loop_of_several_turns[sync]",
        "test_one_required_call_where_calls_may_not_be_parallel",
        "test_strict_schemas_hold_for_every_seed",
        "test_strict_schemas_hold_for_every_seed[named]",
        "test_strict_schemas_hold_for_every_seed[required]",
        "test_the_synchronous_client_folds_the_same[thought]",
        "test_the_synchronous_client_folds_the_same[tools]",
    ),
    "entrypoints/test_chat_speech.py": ("test_texts_are_those_of_transformers[GraniteSpeech]",),
    "entrypoints/test_constrained_calls.py": (
        "test_a_forced_call_cut_off_anywhere_leaves_no_markup[hermes-choice1]",
        "test_a_forced_call_cut_off_anywhere_leaves_no_markup[qwen3_coder-choice1]",
        "test_a_forced_call_cut_off_anywhere_leaves_no_markup[qwen3_coder-required]",
        "test_a_named_tool_is_called_once[hermes]",
        "test_an_answer_follows_a_schema_or_calls_a_tool[hermes]",
        "test_required_calls_are_json_if_the_form_cannot_express_them[None",
        "test_required_calls_are_json_if_the_form_cannot_express_them[hermes-options2]",
        "test_required_calls_follow_their_schemas[qwen3_coder]",
        "test_responses_hold_calls_the_same_way[qwen3_coder]",
        "test_special_tokens_open_constrained_calls[auto]",
        "test_strict_tools_are_constrained_when_the_model_calls_them[hermes]",
    ),
    "entrypoints/test_data_parallel.py": ("test_a_request_is_moved_once[True]",),
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
    "entrypoints/test_messages.py": (
        "test_thinking_and_effort_reach_the_template[fields2",
        "test_thinking_and_effort_reach_the_template[fields3",
    ),
    "entrypoints/test_pictures_pooled.py": (
        "test_tokens_of_texts_and_pictures_have_vectors_that_are_compared[Qwen2VL",
        "test_vectors_are_those_of_transformers[Qwen2VL",
    ),
    "entrypoints/test_responses.py": (
        "test_a_required_call_is_made_for_every_seed[named]",
        "test_a_required_call_is_made_for_every_seed[required]",
        "test_a_schema_holds_for_every_seed",
        "test_the_effort_reaches_the_template[high-True high]",
        "test_the_effort_reaches_the_template[minimal-True low]",
    ),
    "entrypoints/test_responses_tools.py": ("test_a_custom_tools_input_follows_its_format[text]",),
    "entrypoints/test_speech.py": ("test_other_files_are_read[FLAC-44100-2]",),
    "entrypoints/test_structured_outputs.py": (
        "test_a_dead_end_inside_an_output_is_the_requests_fault[True]",
        "test_a_named_tool_is_called_for_every_seed",
        "test_required_tools_are_called_for_every_seed",
    ),
    "entrypoints/test_top.py": (
        "test_a_terminal_is_redrawn_until_interrupted[both]",
        "test_a_terminal_is_redrawn_until_interrupted[vllm]",
    ),
    "entrypoints/test_waiting_limit.py": (
        "test_another_limit_takes_the_place_of_the_default[options1-engine1]",
        "test_goodput_stays_at_five_times_capacity[few slots]",
    ),
    "examples/test_adapters_kernels.py": ("test_it_finds_the_kernels_right[9-4-mixed]",),
    "examples/test_part_packages.py": (
        "test_a_group_gets_its_budget[1-drafts]",
        "test_a_group_gets_its_budget[2-drafts]",
        "test_a_group_gets_its_budget[2-plain]",
        "test_a_group_gets_its_budget[37-plain]",
        "test_large_activations_end_their_request[2]",
    ),
    "kernels/test_adapter_kernels.py": (
        "test_a_row_is_the_same_in_any_company[12-16-dtype0]",
        "test_a_row_is_the_same_in_any_company[40-16-dtype0]",
        "test_chunks_that_are_made_late_are_waited_for[40]",
        "test_chunks_that_are_made_late_are_waited_for[5]",
        "test_every_choice_of_tiles_gives_the_same_product",
    ),
    "kernels/test_attention_kernels.py": (
        "test_decode_of_several_tokens_per_row_equals_its_twin[5-8-2-64-None-3-more0-torch.float32]",
    ),
    "kernels/test_expert_kernels.py": (
        "test_experts_without_gates_equal_their_twin[fp8-(1, 16, 8, 64, 32)]",
        "test_experts_without_gates_equal_their_twin[int8-(1, 16, 8, 64, 32)]",
    ),
    "kernels/test_fused_decode.py": (
        "test_it_equals_its_parts[torch.float16-3-(32, 2, 16)]",
        "test_it_equals_its_parts[torch.float32-3-(4, 2, 64)]",
    ),
    "kernels/test_index_kernels.py": (
        "test_tokens_of_divided_rows_are_chosen_as_by_their_twin[40]",
    ),
    "kernels/test_move_levels.py": (
        "test_it_equals_its_twin[False-keys and values]",
        "test_it_equals_its_twin[False-of an odd width]",
        "test_it_equals_its_twin[True-a latent's groups]",
        "test_it_equals_its_twin[True-keys and values]",
    ),
    "kernels/test_uniform_matmul.py": ("test_parts_are_added_in_one_order[True]",),
    "plugins/adapters/test_gguf_adapters.py": (
        "test_every_layer_has_the_checkpoints_name[gemma2]",
        "test_every_layer_has_the_checkpoints_name[olmo2]",
    ),
    "plugins/adapters/test_peft.py": (
        "test_logits_are_those_of_peft[DoRA with biases]",
        "test_logits_are_those_of_peft[all biases]",
        "test_logits_are_those_of_peft[fractional alpha]",
        "test_logits_are_those_of_peft[no power of two, rsLoRA]",
        "test_logits_are_those_of_peft[one layer]",
        "test_logits_are_those_of_peft[patterns, rsLoRA]",
        "test_logits_are_those_of_peft[rank 1]",
        "test_logits_are_those_of_peft[seven linears]",
        "test_logits_are_those_of_peft[start of MiCA]",
        "test_logits_are_those_of_peft[start orthogonal]",
        "test_logits_are_those_of_peft[trained by VeLoRA]",
    ),
    "plugins/adapters/test_served_adapters.py": (
        "test_adapters_of_experts_give_pefts_tokens[mixtral]",
        "test_every_kind_of_adapter_gives_pefts_tokens_in_one_batch[qwen2]",
    ),
    "plugins/conformance/test_grammar_kit.py": (
        "TestXGrammar::test_the_sandbox_finds_it",
        "test_a_planted_bug_is_caught[Local]",
        "test_a_planted_bug_is_caught[NoBytesBeyondAscii]",
        "test_a_planted_bug_is_caught[RefusesWithTrue]",
        "test_a_planted_bug_is_caught[RollsBackOneTooFew]",
        "test_a_planted_bug_is_caught[SaysNoReason]",
    ),
    "plugins/conformance/test_kv_compressor_kit.py": ("TestSnapKV::test_an_engine_serves_with_it",),
    "plugins/conformance/test_operations_kit.py": (
        "TestTriton::test_add_adapters[float16-1]",
        "TestTriton::test_add_adapters[float16-40]",
        "TestTriton::test_add_adapters[float16-4]",
        "TestTriton::test_states_of_16_bits_continue[float16-torch.float16]",
    ),
    "plugins/conformance/test_speculator_kit.py": (
        "TestFurther::test_an_engine_serves_the_same_tokens_with_it",
        "TestSuffix::test_an_engine_serves_the_same_tokens_with_it",
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
    "plugins/kv_connectors/test_peer_store.py": (
        "test_what_no_peer_has_promised_is_not_awaited[ticket]",
        "test_what_no_peer_has_promised_is_not_awaited[transfer]",
    ),
    "plugins/loaders/test_sharded_state.py": (
        "test_each_rank_loads_what_the_checkpoint_gives_it[llama-2]",
        "test_each_rank_loads_what_the_checkpoint_gives_it[mixtral-2]",
        "test_each_rank_loads_what_the_checkpoint_gives_it[qwen2-2]",
    ),
    "plugins/media/test_omni.py": ("test_videos_beside_pictures[Qwen2_5Omni]",),
    "plugins/media/test_phi4_audio.py": ("test_recordings[published]",),
    "plugins/media/test_videos.py": (
        "test_frames_that_callers_give_are_all_read[Glm4v",
        "test_frames_that_callers_give_are_all_read[Qwen2_5_VL",
        "test_gemma4_reads_frames_as_small_pictures[vision]",
        "test_videos_of_codecs_are_read_with_av[Glm46V",
    ),
    "plugins/models/test_compacted_families.py": (
        "test_a_prefix_stays_whole_while_its_reader_compacts[DeepseekV3",
        "test_attention_layers_are_compacted_beside_states[Lfm3",
        "test_attention_layers_are_compacted_beside_states[Qwen3NextForCausalLM-snap_kv-more1]",
        "test_layers_of_different_sizes_are_compacted_in_one_table[more1-gemma4]",
        "test_rows_of_latents_are_kept[DeepseekV2",
        "test_rows_of_latents_are_kept[LongcatFlash",
    ),
    "plugins/models/test_fallback.py": (
        "test_a_model_equals_itself_in_transformers[AXK1ForCausalLM]",
        "test_a_model_equals_itself_in_transformers[DeepseekV3ForCausalLM]",
        "test_a_model_equals_itself_in_transformers[ExaoneMoeForCausalLM]",
        "test_a_model_equals_itself_in_transformers[FlexOlmoForCausalLM]",
        "test_a_model_equals_itself_in_transformers[Glm4MoeLiteForCausalLM]",
        "test_a_model_equals_itself_in_transformers[HYV3ForCausalLM]",
        "test_a_model_equals_itself_in_transformers[Kolibri1ForCausalLM]",
        "test_a_model_equals_itself_in_transformers[MellumForCausalLM]",
        "test_a_model_equals_itself_in_transformers[MiniCPM3ForCausalLM]",
        "test_a_model_equals_itself_in_transformers[SolarOpenForCausalLM]",
        "test_a_model_equals_itself_in_transformers[YoutuForCausalLM]",
        "test_decode_steps_are_recorded[DeepseekV3ForCausalLM]",
        "test_ranks_compute_together_what_one_does[OlmoeForCausalLM]",
        "test_requests_share_steps_chunks_prefixes_and_blocks[BitNetForCausalLM-14]",
        "test_requests_share_steps_chunks_prefixes_and_blocks[FlintForCausalLM-26]",
    ),
    "plugins/models/test_families.py": (
        "test_a_family_is_the_same_divided_and_changed[GPTJForCausalLM:tied]",
        "test_a_family_is_the_same_divided_and_changed[Gemma4ForCausalLM:experts]",
    ),
    "plugins/models/test_formulas.py": (
        "test_a_family_is_the_same_divided_and_changed[Step1",
        "test_a_family_is_the_same_divided_and_changed[Step3p5",
        "test_kernels_say_what_formulas_say[Step3p5",
    ),
    "plugins/models/test_gemma.py": ("test_kernels_equal_transformers[gemma3]",),
    "plugins/models/test_latent_families.py": (
        "test_kernels_equal_transformers[DeepseekV2ForCausalLM]",
        "test_kernels_equal_transformers[LongcatFlashForCausalLM]",
    ),
    "plugins/models/test_leveled_families.py": (
        "test_attention_layers_have_levels_beside_states[Lfm3",
        "test_attention_layers_have_levels_beside_states[Qwen3NextForCausalLM]",
        "test_latents_have_levels[torch-8:0.7@12,4:0.4@30-key_norm-20-DeepseekV3ForCausalLM]",
        "test_latents_have_levels[torch-8@16,4@40-None-20-DeepseekV2ForCausalLM]",
        "test_latents_have_levels[triton-8:0.7@12,4:0.4@30-snap_kv-4-DeepseekV3ForCausalLM]",
        "test_layers_that_see_all_have_levels_beside_windows[gpt-oss]",
    ),
    "plugins/models/test_mixtures.py": ("test_a_mixture_is_the_same_divided_and_changed[Dbrx",),
    "plugins/models/test_state_families.py": (
        "test_a_family_is_the_same_divided[BambaForCausalLM]",
        "test_a_family_is_the_same_divided[JambaForCausalLM]",
        "test_a_family_is_the_same_divided[Lfm2ForCausalLM]",
        "test_a_family_is_the_same_divided[OlmoHybridForCausalLM]",
        "test_a_family_is_the_same_divided[Qwen3_5ForCausalLM]",
        "test_a_family_is_the_same_divided[ZambaForCausalLM]",
        "test_stages_keep_the_states_of_their_layers[3]",
        "test_states_have_the_type_that_is_asked_for[float16",
    ),
    "plugins/models/test_state_launches.py": (
        "test_a_layer_of_one_row_is_one_launch_between_products[NemotronH",
    ),
    "plugins/models/test_text_parts.py": (
        "test_a_text_part_equals_the_whole_without_images[Ovis2ForConditionalGeneration]",
    ),
    "plugins/models/test_timestamp_rules.py": ("test_tokens_are_those_of_transformers[plain]",),
    "plugins/models/test_zaya.py": ("test_zaya_equals_transformers[ZayaForCausalLM:longer",),
    "plugins/operations/test_without_triton.py": ("test_a_refusal_names_what_is_missing[triton]",),
    "plugins/parsers/test_think_tags_and_hermes.py": (
        "test_any_cutting_gives_the_same_fold[hermes]",
        "test_any_cutting_gives_the_same_fold[not thinking]",
        "test_any_cutting_gives_the_same_fold[thinking]",
    ),
    "plugins/quantization/test_calculated_kv_scales.py": (
        "test_calculated_scales_bring_large_keys_into_the_cache[fp8_e5m2]",
    ),
    "plugins/quantization/test_divided_formats.py": (
        "test_experts_are_held_whole_in_every_format[TestFp8Blocks",
        "test_experts_are_held_whole_in_every_format[TestFp8Static",
        "test_experts_are_held_whole_in_every_format[TestGptqSymmetric",
        "test_experts_are_held_whole_in_every_format[TestPerChannel",
        "test_experts_are_held_whole_in_every_format[TestRoundedAtLoad",
        "test_experts_are_held_whole_in_every_format[TestW4A16Asymmetric",
    ),
    "plugins/quantization/test_mxfp4.py": ("test_kernels_read_the_weights[7]",),
    "plugins/speculators/test_draft_model.py": (
        "test_a_model_that_drafts_for_itself_is_always_right[gemma3]",
        "test_a_model_that_drafts_for_itself_is_always_right[qwen3]",
    ),
    "plugins/speculators/test_mtp.py": (
        "test_the_layer_drafts_what_transformers_computes[Glm4Moe",
        "test_the_layer_drafts_what_transformers_computes[HYV3",
        "test_the_layer_drafts_what_transformers_computes[MiMoV2Flash",
    ),
    "plugins/speculators/test_recorded_passes.py": (
        "test_recorded_passes_propose_what_launched_ones_do[medusa",
    ),
    "plugins/speculators/test_updated_drafts.py": (
        "test_a_draft_model_is_updated_beside_the_model_or_alone[eagle]",
        "test_drafting_layers_of_the_checkpoint_are_updated[by_files]",
        "test_drafts_are_the_same_after_sleep[1]",
    ),
    "test_security.py": ("test_code_of_a_checkpoint_is_never_imported[True]",),
}
"""Whose lines and branches another case of the same test, which runs by day, covers too: a second
family, backend, seed or number. By file and the beginning of the name."""

TOGETHER: dict[str, tuple[str, ...]] = {
    "core/adapters/test_adapted_engine.py": ("test_all_members_have_an_adapter_or_none",),
    "core/engine/test_combinations.py": (
        "test_what_goes_together_serves[input_embeds and kv_levels",
        "test_what_goes_together_serves[input_embeds and routed_experts",
        "test_what_goes_together_serves[kv_compression and adapters",
        "test_what_goes_together_serves[kv_transfer and input_embeds",
        "test_what_goes_together_serves[kv_transfer and kv_levels",
        "test_what_goes_together_serves[recording and batch_invariant",
        "test_what_goes_together_serves[recording and calculated_scales",
        "test_what_goes_together_serves[routed_experts and batch_invariant",
        "test_what_goes_together_serves[routed_experts and kv_levels",
        "test_what_goes_together_serves[speculation and input_embeds",
        "test_what_goes_together_serves[speculation and kv_compression",
    ),
    "core/engine/test_parity.py": ("test_triton_backend_equals_transformers[llama4",),
    "core/grammars/test_hostile_shapes.py": ("test_hostile_shapes_are_served_or_refused[scale1]",),
    "core/loading/test_family_fields.py": (
        "test_core_checks_only_fields_that_most_families_have",
        "test_core_reads_only_fields_that_most_families_have",
    ),
    "core/parallel/test_pipeline.py": (
        "test_stages_take_what_one_rank_takes[mistral-window",
        "test_the_first_stage_gets_the_tokens_of_the_rows_that_sample",
    ),
    "core/worker/test_cache_groups.py": (
        "test_a_connector_keeps_whole_prompts",
        "test_kernels_give_the_same_with_recorded_prompts[gemma3]",
    ),
    "core/worker/test_drafts_of_all_methods.py": (
        "test_mixes_give_the_tokens_of_an_engine_without_drafts",
    ),
    "core/worker/test_drafts_of_all_rows.py": (
        "test_mixes_of_rows_give_the_tokens_of_an_engine_without_drafts[KV compression]",
        "test_mixes_of_rows_give_the_tokens_of_an_engine_without_drafts[sources]",
        "test_mixes_of_rows_give_the_tokens_of_an_engine_without_drafts[states in stages]",
    ),
    "core/worker/test_graphs.py": ("test_work_in_spare_time_leaves_requests_alone",),
    "core/worker/test_kv_compression.py": (
        "test_tokens_are_those_of_dense_attention_to_what_is_left[triton-ExpectedAttention",
    ),
    "core/worker/test_kv_formats.py": (
        "test_all_policies_compact_it[int4]",
        "test_prefixes_preemption_and_other_rows_change_no_token[int4]",
        "test_triton_gives_the_tokens_of_torch[int8_int4]",
    ),
    "core/worker/test_kv_levels.py": (
        "test_drafts_see_levels",
        "test_more_requests_run_at_once_in_the_same_bytes",
        "test_tokens_are_those_of_a_cache_that_is_rounded_and_cut_by_hand[triton",
    ),
    "core/worker/test_kv_tiers.py": (
        "test_under_pressure_caches_are_compacted_before_one_is_preempted",
    ),
    "core/worker/test_shared_prefixes.py": (
        "test_tokens_of_kernels_that_read_a_prefix_once[True]",
    ),
    "core/worker/test_speculation.py": (
        "test_compacted_caches_give_the_same_tokens[gemma3-snap_kv]",
        "test_recorded_forward_passes_and_kernels_give_the_same[torch-rejection]",
    ),
    "core/worker/test_suffix_drafts.py": (
        "test_adaptive_widths_change_no_token",
        "test_ranks_propose_alike[stages]",
    ),
    "docs/test_marked_blocks.py": (
        "test_a_block_does_what_the_page_shows[docs/how-to/kv-connectors.md:161]",
        "test_a_block_does_what_the_page_shows[docs/how-to/test-a-plugin.md:13]",
    ),
    "entrypoints/bench/test_bench_serve.py": ("test_chats_find_what_was_said_in_the_prefix_cache",),
    "entrypoints/bench/test_kv_compression_bench.py": ("test_what_is_kept_decides_what_is_lost",),
    "entrypoints/test_fronts.py": (
        "test_a_front_end_listens_after_the_first_does",
        "test_a_profile_of_the_engines_process_is_begun_and_ended_at_any_front_end",
        "test_a_terminated_front_end_finishes_its_streams_first",
    ),
    "entrypoints/test_plugin_options.py": (
        "test_several_front_ends_have_the_options_and_count_together",
    ),
    "entrypoints/test_request_hooks.py": ("test_a_plugin_says_whose_a_request_is[fronts]",),
    "entrypoints/test_serve_command.py": (
        "test_what_was_there_before_the_first_request_is_collected_at_exit",
    ),
    "entrypoints/test_server_options.py": ("test_a_process_serves_https_with_keys_from_a_file",),
    "examples/test_kv_recall.py": ("test_results_are_json_lines_and_a_table",),
    "examples/test_outside_packages.py": (
        "test_an_example_and_skeletons_come_together_serve_and_go",
    ),
    "examples/test_tiny_model.py": ("test_it_says_the_same_from_a_cache_of_8_bits",),
    "plugins/adapters/test_served_adapters.py": (
        "test_plain_adapters_give_pefts_tokens_in_steps_that_may_be_recorded",
    ),
    "plugins/executors/test_rank_failures.py": ("test_a_rank_without_memory_ends_the_engine",),
    "plugins/executors/test_ranks.py": (
        "test_a_prefix_hit_gives_the_same_tokens",
        "test_blocks_come_back_from_host_memory_on_all_ranks",
        "test_windows_are_compacted_on_two_ranks[snap_kv]",
    ),
    "plugins/executors/test_ray_executor.py": (
        "test_ranks_of_two_nodes_give_the_tokens_of_one_rank",
    ),
    "plugins/executors/test_stages.py": (
        "test_a_prefix_hit_gives_the_same_tokens",
        "test_blocks_come_back_from_host_memory_on_all_stages",
    ),
    "plugins/kv_connectors/test_kv_connector_kits.py": (
        "TestCpuOffload::test_engines_at_once_on_one_store",
        "TestCpuOffload::test_partial_hits_end_at_block_borders",
        "TestFileStore::test_a_load_that_fails_costs_a_recompute[0.5]",
        "TestFileStore::test_random_traffic_gives_the_tokens_of_an_engine_without",
        "TestMulti::test_a_load_that_fails_costs_a_recompute",
        "TestMulti::test_an_engine_stops_in_the_middle_of_transfers",
        "TestMulti::test_random_traffic_gives_the_tokens_of_an_engine_without",
        "TestPeerStore::test_a_load_that_fails_costs_a_recompute[0.5]",
        "TestPeerStore::test_engines_at_once_on_one_store",
        "TestPeerStore::test_partial_hits_end_at_block_borders",
        "TestPeerStore::test_random_traffic_gives_the_tokens_of_an_engine_without[1]",
    ),
    "plugins/media/test_omni.py": ("test_the_sound_of_a_video[Qwen2_5Omni]",),
    "plugins/media/test_recorded_encoders.py": (
        "test_pictures_of_the_only_size_are_expected[LlavaForConditionalGeneration-160",
    ),
    "plugins/models/test_leveled_families.py": (
        "test_latents_have_levels[torch-8:0.7@12,4:0.4@30-key_norm-20-DeepseekV2ForCausalLM]",
        "test_layers_that_see_all_have_levels_beside_windows[gemma4]",
    ),
    "plugins/models/test_timestamp_rules.py": (
        "test_tokens_are_those_of_transformers[preempted]",
        "test_tokens_are_those_of_transformers[ranks]",
    ),
    "plugins/speculators/test_draft_model.py": (
        "test_a_draft_model_keeps_a_window_when_caches_are_compacted[gemma3-rounded]",
        "test_another_model_drafts_what_it_would_say[gemma3-50]",
        "test_ranks_draft_for_themselves[1]",
        "test_the_last_stage_drafts[qwen3-2]",
    ),
    "plugins/speculators/test_mtp.py": (
        "test_the_last_stage_has_the_layer_and_embeddings[DeepseekV3ForCausalLM]",
    ),
    "plugins/speculators/test_recorded_passes.py": (
        "test_a_model_whose_drafts_rest_reads_on",
        "test_calls_go_on_where_they_cannot_be_recorded[Medusa]",
        "test_recorded_passes_propose_what_launched_ones_do[draft_model",
    ),
    "plugins/speculators/test_rejection_sampling.py": ("test_ranks_decide_alike[None]",),
    "plugins/speculators/test_stateless_heads.py": (
        "test_heads_without_a_cache_go_with_kv_compression",
    ),
}
"""Several features at once, or one through several processes, recorded steps, or kernels in the
interpreter: each of them has tests of its own by day."""

STRESS: dict[str, tuple[str, ...]] = {
    "core/adapters/test_adapted_engine.py": (
        "test_random_traffic_gives_each_request_its_adapters_tokens",
    ),
    "core/engine/test_request_ids.py": (
        "test_any_traffic_under_colliding_names_ends_and_leaves_nothing_in_use",
    ),
    "core/engine/test_traffic.py": ("test_requests_together_get_the_tokens_of_each_alone",),
    "core/scheduling/test_draft_widths.py": (
        "test_drafts_come_back_when_they_pay_again",
        "test_it_is_about_as_fast_as_the_best_width[0.4-8]",
        "test_it_is_about_as_fast_as_the_best_width[0.8-32]",
        "test_text_that_cannot_be_guessed_is_never_slower[0.3-256]",
        "test_text_that_cannot_be_guessed_is_never_slower[1.0-256]",
    ),
    "core/scheduling/test_simulator.py": (
        "test_two_thousand_requests_are_all_served_in_a_tight_cache",
    ),
    "core/test_registry.py": (
        "test_fifty_plugins_are_found_in_little_more_time_than_their_imports_take",
    ),
    "core/worker/test_kv_compression.py": ("test_a_batch_of_many_gives_the_tokens_of_each_alone",),
    "core/worker/test_speculation.py": ("test_drafts_leave_the_distribution_as_it_is",),
    "entrypoints/test_structured_outputs.py": (
        "test_a_strict_schema_holds_for_every_seed_and_temperature",
    ),
    "plugins/kv_connectors/test_builtin_connectors.py": (
        "test_cpu_offload_with_hardly_any_memory",
        "test_many_writers_and_readers_never_see_half_a_file",
    ),
    "plugins/speculators/test_rejection_sampling.py": ("test_a_wrong_distribution_is_found",),
}
"""Random traffic, many requests at once, many seeds, and simulations of minutes."""

EACH_VALUE: dict[str, tuple[str, ...]] = {
    "core/worker/test_compaction_waits.py": ("test_no_operation_of_a_compaction_waits",),
    "entrypoints/test_exact_counts.py": ("test_a_stream_counts_all_its_tokens",),
    "entrypoints/test_large_responses.py": (
        "test_log_probabilities_of_a_request_are_bounded_in_sum",
    ),
    "entrypoints/test_loglikelihood.py": ("test_log_likelihoods_are_those_of_transformers",),
    "entrypoints/test_plugin_failures.py": (
        "test_a_listener_that_raises_is_named_and_changes_nothing",
    ),
    "entrypoints/test_serve_command.py": ("test_a_signal_ends_a_server_that_is_loading",),
    "kernels/test_adapter_kernels.py": (
        "test_a_row_is_the_same_in_any_company",
        "test_an_adapter_that_is_not_finite_spoils_its_own_rows_only",
        "test_products_equal_those_by_hand",
        "test_products_of_normed_rows",
    ),
    "kernels/test_attention_kernels.py": ("test_biases_and_sinks",),
    "kernels/test_cached_scores.py": (
        "test_codes_have_scales_and_zeros",
        "test_scores_are_those_of_copies",
    ),
    "kernels/test_expert_kernels.py": ("test_",),
    "kernels/test_foreign_experts.py": ("test_",),
    "kernels/test_fused_decode.py": ("test_weights_that_are_asked_for_change_nothing",),
    "kernels/test_index_kernels.py": ("test_tokens_are_chosen_as_by_their_twin",),
    "kernels/test_leveled_attention.py": ("test_",),
    "kernels/test_move_levels.py": ("test_it_equals_its_twin",),
    "kernels/test_pointwise_kernels.py": ("test_",),
    "kernels/test_quant_kernels.py": ("test_",),
    "kernels/test_quantized_cache_kernels.py": ("test_",),
    "kernels/test_small_m_matmul.py": ("test_",),
    "kernels/test_state_kernels.py": ("test_a_prompt_in_two_steps_is_that_prompt",),
    "kernels/test_state_steps.py": ("test_",),
    "plugins/attention/test_attention_kit.py": ("Test",),
    "plugins/attention/test_latent_attention_kit.py": ("Test",),
    "plugins/conformance/test_collectives_kit.py": ("Test",),
    "plugins/conformance/test_kv_compressor_kit.py": ("Test",),
    "plugins/conformance/test_operations_kit.py": ("Test",),
    "plugins/models/test_compacted_families.py": (
        "test_layers_that_see_all_are_compacted_beside_windows",
    ),
    "plugins/operations/test_quantized_products.py": ("test_products_by_4_bits_equal_plain_ones",),
    "plugins/parsers/test_think_tags_and_hermes.py": ("test_hostile_text_takes_linear_time",),
    "plugins/parsers/test_tool_parsers.py": ("test_odd_tools_do_not_break_a_parser",),
}
"""Tests of several parameters of which, without a GPU, as few cases run by day as have each value
of each. By file and the beginning of the name."""


TESTS = Path(__file__).resolve().parent


def mark_repeats(items: Iterable[pytest.Item]) -> None:
    """Mark REPEATS, TOGETHER and STRESS as slow."""
    for item in _among((REPEATS, TOGETHER, STRESS), items):
        item.add_marker(pytest.mark.slow)


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what EACH_VALUE leaves out."""
    tests: dict[str, list[Any]] = {}
    for item in _among((EACH_VALUE,), items):
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        values = {case: {*map(_named, case.callspec.params.items())} for case in cases}
        missing = set().union(*values.values())
        while missing:
            best = max(values, key=lambda case: len(values[case] & missing))
            missing -= values.pop(best)
        for case in values:
            case.add_marker(pytest.mark.slow)


def _named(parameter: tuple[str, object]) -> tuple[str, str]:
    name, value = parameter
    return name, repr(value)


def _among(
    lists: Iterable[dict[str, tuple[str, ...]]], items: Iterable[pytest.Item]
) -> Iterator[pytest.Item]:
    """Yield those of the items that are in one of the lists."""
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        file = item.path.relative_to(TESTS).as_posix()
        names = tuple(name for each in lists for name in each.get(file, ()))
        if names and item.nodeid.partition("::")[2].startswith(names):
            yield item

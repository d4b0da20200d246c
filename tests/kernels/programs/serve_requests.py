"""Serves requests of many lengths, and checks that nothing is compiled after the start. After the
model's name, a number of requests at once other than 12."""

import asyncio
import json
import sys
from pathlib import Path

from jackfield import AsyncEngine, EngineConfig, SamplingParams

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 192, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_5 = {
    **QWEN3, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4, "hidden_act": "silu", "attn_output_gate": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
MAMBA = {
    "architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 64,
    "state_size": 16, "num_hidden_layers": 2, "vocab_size": 192, "conv_kernel": 4, "expand": 2,
    "intermediate_size": 128, "time_step_rank": 4, "layer_norm_epsilon": 1e-5, "use_bias": False,
    "use_conv_bias": True, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
GLM_MOE_DSA = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "vocab_size": 192, "index_topk": 600,
    "index_head_dim": 32, "index_n_heads": 8, "indexer_types": ["full", "shared"],
    "mlp_layer_types": ["dense", "dense"], "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "qwen3": (QWEN3, {"_prefill_kernel", "_fused_decode_kernel"}, {"_decode_kernel"}),
    "qwen3_5": (
        QWEN3_5,
        {"_delta_chunk_kernel", "delta_recurrence_kernel", "delta_step_kernel"},
        {"_decode_kernel"},
    ),
    "glm_moe_dsa": (
        GLM_MOE_DSA,
        {
            "_index_inputs_kernel",
            "_index_scores_kernel",
            "_part_choice_kernel",
            "_index_choice_kernel",
        },
        {"_latent_decode_kernel", "_latent_join_kernel", "_latent_prompt_kernel"},
    ),
    "mamba": (MAMBA, {"_selective_scan_kernel", "_selective_step_kernel", "_conv_kernel"}, set()),
}
"""Name → config.json, kernels that a start compiles, and more that are compiled by then."""


def serve(options, plugins, compiled, launched):
    """compiled: (kernel, thread) of each compilation; launched: kernels, None if not recorded."""
    folder = Path(sys.argv[1])
    checkpoint, first, more = MODELS[sys.argv[2]]
    folder.joinpath("config.json").write_text(json.dumps(checkpoint))
    cached = folder.joinpath("cache").exists()
    numbers = [int(word) for word in sys.argv[3:] if word.isdigit()]
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=1000,
        skip_tokenizer_init=True,
        max_num_seqs=(numbers or [12])[0],
        max_num_batched_tokens=600,
        **options,
    )

    async def main():
        async with AsyncEngine(config, plugins=plugins) as engine:
            names = {name for name, _ in compiled}
            assert cached or first <= names
            ready = len(compiled)

            async def generate(length, each=lambda: None, **params):
                sampling = SamplingParams(
                    max_tokens=40, ignore_eos=True, detokenize=False, **params
                )
                async for _ in engine.generate([n % 150 for n in range(length)], sampling):
                    each()

            # Before everything is recorded: a prompt whose beginning is cached, and one in parts.
            for length in (65, 250, 700):
                await generate(length, temperature=0.0)
            while await engine.core.executor._thread.call(
                engine.core.executor._worker.prepare_ahead
            ):
                pass
            for length in (1, 3, 12, 100, 700):
                await generate(length, temperature=0.0)
            others = []

            def one_more():
                if len(others) < 11:
                    others.append(
                        asyncio.create_task(generate(17 * len(others) + 1, temperature=0.7))
                    )

            # Prompts that come while others decode.
            await generate(9, one_more)
            await asyncio.gather(*others)
        for name, thread in compiled[:ready]:
            assert thread.startswith("jackfield-compile"), f"{name} was compiled on {thread}"
        assert not compiled[ready:], compiled[ready:]
        if launched is not None:
            assert names - {"_smallest_kernel"} <= set(launched), names - set(launched)
            expected = {"_small_m_matmul_kernel", "_row_kernel", *more}
            assert cached or expected <= names, expected - names

    asyncio.run(main())

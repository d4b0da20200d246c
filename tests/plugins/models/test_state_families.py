"""Families whose layers keep states say what `transformers` says, through the engine: in chunks,
beside others, after preemption, and several times from one prompt."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nights import some_by_day
from rank_executor import Plugin
from safetensors.torch import load_file, save_file
from test_families import (
    LEFT_OUT,
    check_divided,
    check_logits,
    checkpoint,
    make_reference,
    score,
)
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, OutOfMemory
from jackfield.core.hooks import hookimpl
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.state.channel_delta import KimiDeltaAttention
from jackfield.core.registry import Provenance, load_plugins
from jackfield.plugins.conformance.paged_model import VOCAB, PagedModel
from jackfield.plugins.models.minimax import CONSTANTS

from helpers import at_once, edit_json, interpreted

GROUPS = 2 if "group_size" in inspect.signature(MambaRMSNormGated).parameters else 1
"""Older versions of transformers normalise all groups together."""
MAMBA2 = {
    "num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": GROUPS, "chunk_size": 16,
}  # fmt: skip
HYBRID = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": GROUPS,
    "mamba_chunk_size": 16, "time_step_limit": (0.3, 2.0),
}  # fmt: skip
GRANITE = {
    **HYBRID, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.6,
    "logits_scaling": 2.5, "shared_intermediate_size": 48, "mamba_proj_bias": True,
}  # fmt: skip
FALCON = {
    **HYBRID, "mamba_d_ssm": 128, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.6, "attention_out_multiplier": 0.8,
    "attention_in_multiplier": 1.2, "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
    "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.9,
}  # fmt: skip
DELTA_SIZES = {
    "linear_key_head_dim": 12, "linear_value_head_dim": 10, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
DELTA = {
    **DELTA_SIZES, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "partial_rotary_factor": 0.5,
}  # fmt: skip
LFM3 = {
    "layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 12,
    "conv_L_cache": 7, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5,
        },
    },
}  # fmt: skip
OLMO = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 10, "linear_conv_kernel_dim": 3, "head_dim": LEFT_OUT,
    "rope_parameters": None,
}  # fmt: skip
LATENT = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"], "kv_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 4, "num_local_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 48, "topk_group": 1, "n_group": 1,
}  # fmt: skip
KIMI = {
    **LATENT, "linear_head_dim": 12, "linear_num_heads": 4, "q_lora_rank": None,
    "head_dim": LEFT_OUT,
}  # fmt: skip
LING_3 = {**LATENT, "head_dim": 12, "n_group": 2}
NEMOTRON = {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 2,
    "chunk_size": 16, "num_hidden_layers": LEFT_OUT, "time_step_min": 0.5,
    "time_step_floor": 0.1, "time_step_limit": (0.0, 0.6),
}  # fmt: skip
NEMOTRON_3 = {
    **NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 8, "n_group": 2,
    "num_experts_per_tok": 3, "moe_intermediate_size": 48, "routed_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {**HYBRID, "attn_layer_indices": [1]},
    "BailingHybridForCausalLM": {**LING_3, "kda_lower_bound": -3.0},
    "BailingHybridForCausalLM:no bound": {
        # All experts of a token: rounded to bfloat16, a near tie would choose others.
        **LING_3, "kda_safe_gate": False, "n_group": 1, "num_experts_per_tok": 8,
    },
    "FalconH1ForCausalLM": {
        **FALCON, "mamba_rms_norm": False, "projectors_bias": True, "attention_bias": True,
        "mlp_bias": True, "mamba_proj_bias": True,
    },
    "FalconH1ForCausalLM:norm first": {
        **FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True,
    },
    "FalconMambaForCausalLM": {"state_size": 6, "mixer_rms_eps": 0.1},
    "GraniteMoeHybridForCausalLM": {**GRANITE, "num_local_experts": 0},
    # Nearly all experts of a token: a near tie in bfloat16 chooses among those of least weight.
    "GraniteMoeHybridForCausalLM:experts": {
        **GRANITE, "num_local_experts": 6, "num_experts_per_tok": 5, "intermediate_size": 48,
        "position_embedding_type": "rope",
    },
    "JambaForCausalLM": {
        "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 3, "attn_layer_offset": 1,
        "mamba_d_state": 6,
    },
    # Nearly all experts of a token: a near tie in bfloat16 chooses among those of least weight.
    "LaraMiniForCausalLM": {
        **DELTA_SIZES, "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
        "sliding_window": 12, "num_experts": 6, "num_experts_per_tok": 5,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32,
    },
    "Lfm2ForCausalLM": {
        "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True,
        "block_multiple_of": 16, "head_dim": LEFT_OUT,
    },
    "Lfm2MoeForCausalLM": {
        "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "head_dim": LEFT_OUT, "routed_scaling_factor": 1.5,
    },
    "Lfm3ForCausalLM": LFM3,
    "Lfm3ForCausalLM:plain": {
        **LFM3, "use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True,
        "conv_bias": True,
    },
    "Mamba2ForCausalLM": {**MAMBA2, "time_step_limit": (0.3, 2.0)},
    # All experts of a token: rounded to bfloat16, a near tie would choose others.
    "KimiLinearForCausalLM": {**KIMI, "num_experts_per_tok": 8},
    "KimiLinearForCausalLM:narrow queries": {**KIMI, "q_lora_rank": 20, "n_group": 2},
    "MambaForCausalLM": {"state_size": 6, "use_bias": True},
    "MiniMaxForCausalLM": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6, "num_experts_per_tok": 2, "block_size": 16,
        "full_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.7, "linear_attn_beta_factor": 1.2,
        "linear_attn_alpha_factor": 0.6, "mlp_alpha_factor": 1.1, "mlp_beta_factor": 0.8,
    },
    "NemotronHForCausalLM": {
        **NEMOTRON,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    },
    "NemotronHForCausalLM:experts": {**NEMOTRON_3, "n_group": 1, "num_experts_per_tok": 8},
    "NemotronHForCausalLM:latent experts": {**NEMOTRON_3, "moe_latent_size": 24, "topk_group": 2},
    "OlmoHybridForCausalLM": OLMO,
    "OlmoHybridForCausalLM:rope": {
        **OLMO, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "linear_allow_neg_eigval": False,
    },
    "OlmoHybridForCausalLM:fewer keys": {**OLMO, "linear_num_key_heads": 2},
    "Qwen3NextForCausalLM": {
        **DELTA, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2,
    },
    "Qwen3_5ForCausalLM": DELTA,
    "Qwen3_5MoeForCausalLM": {
        # All experts of a token: rounded to bfloat16, a near tie would choose others.
        **DELTA, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
    },
    "ZambaForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4, "mamba_d_state": 12, "n_mamba_heads": 2, "mamba_dt_rank": 6,
        "head_dim": LEFT_OUT, "attention_head_dim": 32, "num_key_value_heads": 2,
        "mamba_proj_bias": True,
    },
    "Zamba2ForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 5, "mamba_d_state": 12, "mamba_ngroups": 2, "n_mamba_heads": 8,
        "num_mem_blocks": 2, "adapter_rank": 6, "use_shared_attention_adapter": True,
        "use_mem_rope": True, "head_dim": LEFT_OUT, "num_key_value_heads": 4,
        "time_step_min": 0.3,
    },
}  # fmt: skip
PROMPTS = [[3 + (7 * i * n) % (VOCAB - 3) for i in range(1, n)] for n in (3, 6, 42)]
OUTPUT = 6


def reference_and_folder(case: str, folder: Path) -> tuple[Any, Path]:
    reference = make_reference(case, CASES[case])
    checkpoint(reference, case.partition(":")[0], folder)
    if case.startswith("Olmo"):
        keys = 24 if case.endswith("fewer keys") else 48
        divide_convolutions(folder, [keys, keys, 40])
    return reference, folder


def divide_convolutions(folder: Path, widths: list[int]) -> None:
    """transformers 5.23 saves convolutions of queries, keys and values as equal thirds."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".q_conv1d." in name]:
        names = [name.replace(".q_", f".{part}_") for part in "qkv"]
        parts = torch.cat([tensors[each] for each in names]).split(widths)
        tensors |= {each: part.clone() for each, part in zip(names, parts, strict=True)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def config(folder: Path, **options: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 3,
        "max_num_batched_tokens": 16, "block_size": 4, **options,
    }  # fmt: skip
    return EngineConfig(model=str(folder), **settings)


async def answer(engine: AsyncEngine, prompt: list[int], **params: Any) -> Any:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=1, **params
    )
    *_, last = [output async for output in engine.generate(prompt, sampling)]
    return last


def check(prompt: list[int], output: Any, expected: Callable[[list[int]], torch.Tensor]) -> None:
    for chosen in output.outputs:
        wanted = expected(prompt + chosen.token_ids)[len(prompt) - 1 : -1]
        assert len(chosen.token_ids) == OUTPUT
        for row, token, told in zip(wanted, chosen.token_ids, chosen.logprobs, strict=True):
            assert float(row.max() - row[token]) <= 1e-3
            assert told[token].logprob == pytest.approx(float(row[token]), abs=1e-3)


@pytest.mark.parametrize("case", CASES)
async def test_a_family_equals_transformers(case: str, tmp_path: Path) -> None:
    """Four requests for three slots, a prompt longer than a step, and a slot that is used again."""
    reference, folder = reference_and_folder(case, tmp_path)
    check_logits(folder, reference)
    async with AsyncEngine(config(folder, num_gpu_blocks_override=96)) as engine:
        prompts = [*PROMPTS, PROMPTS[1]]
        answers = await at_once(engine, *(answer(engine, prompt) for prompt in prompts))
        engine.core.check_idle()
    for prompt, output in zip(prompts, answers, strict=True):
        check(prompt, output, lambda tokens: score(reference, tokens))


DIVIDED_BY_DAY = (
    "BailingHybridForCausalLM", "BambaForCausalLM", "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM:experts", "JambaForCausalLM", "KimiLinearForCausalLM",
    "Lfm2ForCausalLM", "Lfm3ForCausalLM", "MambaForCausalLM", "MiniMaxForCausalLM",
    "NemotronHForCausalLM:latent experts", "OlmoHybridForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM", "ZambaForCausalLM",
)  # fmt: skip
"""One of each kind of state."""


@pytest.mark.parametrize("case", some_by_day(CASES, DIVIDED_BY_DAY))
def test_a_family_is_the_same_divided(case: str, tmp_path: Path) -> None:
    _, folder = reference_and_folder(case, tmp_path)
    check_divided(folder, case.partition(":")[0])


class Kernels:
    """Registers the kernels over states beside torch for all else: the interpreter is slow."""

    jackfield_api = 3

    @hookimpl
    def register_operations(self, registry: Any) -> None:
        pytest.importorskip("triton")
        from jackfield.plugins.operations.states import TritonStates

        class StateKernels(TritonStates, Operations):
            """Results by the kernels."""

            name = "state_kernels"

        registry.add("state_kernels", StateKernels)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    "case",
    [
        "Qwen3NextForCausalLM",
        "JambaForCausalLM",
        "FalconH1ForCausalLM:norm first",
        "Lfm3ForCausalLM",
        "ZambaForCausalLM",
    ],
)
async def test_kernels_over_states_equal_transformers(case: str, tmp_path: Path) -> None:
    """A prompt in two steps of several chunks each, and from the states of its prefix."""
    reference, folder = reference_and_folder(case, tmp_path)
    plugins = load_plugins()
    plugins.add_plugin(Kernels(), Provenance("tests", "0", "kernels"))
    options: dict[str, Any] = {
        "device": "cpu", "operations": "state_kernels", "max_num_batched_tokens": 40,
        "num_gpu_blocks_override": 96,
    }  # fmt: skip
    async with AsyncEngine(config(folder, **options), plugins=plugins) as engine:
        prompts = [[*PROMPTS[2], *PROMPTS[1]], PROMPTS[0]]
        answers = await at_once(engine, *(answer(engine, prompt) for prompt in prompts))
        prompts.append(prompts[0])
        answers.append(await answer(engine, prompts[-1]))
    assert answers[-1].num_cached_tokens == 44
    for prompt, output in zip(prompts, answers, strict=True):
        check(prompt, output, lambda tokens: score(reference, tokens))


@pytest.mark.parametrize("caching", [True, False])
async def test_preempted_requests_are_computed_again(caching: bool, tmp_path: Path) -> None:
    """Blocks for 52 tokens, which prompts and answers outgrow."""
    reference, folder = reference_and_folder("Mamba2ForCausalLM", tmp_path)
    prompts = [PROMPTS[2][n : 2 * n] for n in (16, 14, 15)]
    options = {"num_gpu_blocks_override": 14, "enable_prefix_caching": caching}
    async with AsyncEngine(config(folder, **options)) as engine:
        answers = await at_once(engine, *(answer(engine, prompt) for prompt in prompts))
        assert engine.core.stats().num_preemptions > 0
    for prompt, output in zip(prompts, answers, strict=True):
        check(prompt, output, lambda tokens: score(reference, tokens))


@pytest.mark.parametrize("caching", [True, False])
async def test_completions_of_one_prompt_each_have_a_state(caching: bool, tmp_path: Path) -> None:
    """With prefix caching, all but the first start from its states."""
    reference, folder = reference_and_folder("Mamba2ForCausalLM", tmp_path)
    async with AsyncEngine(config(folder, enable_prefix_caching=caching)) as engine:
        output = await answer(engine, PROMPTS[2], n=3)
        steps = engine.core.stats().steps
    assert len(output.outputs) == 3
    assert (steps < 12) == caching
    check(PROMPTS[2], output, lambda tokens: score(reference, tokens))


@pytest.mark.parametrize("case", ["Mamba2ForCausalLM", "BambaForCausalLM"])
async def test_a_prefix_hit_starts_from_the_states_after_it(case: str, tmp_path: Path) -> None:
    """States are kept at the end of a prompt, and after what two prompts have in common."""
    reference, folder = reference_and_folder(case, tmp_path)
    first = PROMPTS[2]
    longer = [*first, *PROMPTS[1]]
    others = [[*first[:22], last, 7, 8, 9, last] for last in (11, 12, 13)]
    async with AsyncEngine(config(folder, num_gpu_blocks_override=96)) as engine:
        answers = [await answer(engine, prompt) for prompt in (first, first, longer, *others)]
        assert await engine.reset_prefix_cache()
        forgotten = await answer(engine, first)
    # 41 tokens: 10 blocks of 4. Of 22 tokens in common, 5 blocks.
    assert [output.num_cached_tokens for output in answers] == [0, 40, 40, 0, 20, 20]
    assert forgotten.num_cached_tokens == 0
    for prompt, output in zip((first, first, longer, *others), answers, strict=True):
        check(prompt, output, lambda tokens: score(reference, tokens))


@pytest.mark.parametrize("num_stages", [2, 3])
async def test_stages_keep_the_states_of_their_layers(num_stages: int, tmp_path: Path) -> None:
    """With three, one has no attention, and one no states."""
    reference, folder = reference_and_folder("BambaForCausalLM", tmp_path)
    prompts = [PROMPTS[2], [*PROMPTS[2][:22], 11, 7, 8], [*PROMPTS[2][:22], 12, 7], PROMPTS[1]]
    options = {
        "pipeline_parallel_size": num_stages, "executor": "rank_threads",
        "num_gpu_blocks_override": 96,
    }  # fmt: skip
    async with AsyncEngine(config(folder, **options), plugins=load_plugins(extra=[Plugin()])) as e:
        answers = [await answer(e, prompt) for prompt in prompts]
        answers += await at_once(e, *(answer(e, prompt) for prompt in prompts))
    assert [output.num_cached_tokens for output in answers[:4]] == [0, 0, 20, 0]
    assert answers[4].num_cached_tokens == 40
    for prompt, output in zip(prompts * 2, answers, strict=True):
        check(prompt, output, lambda tokens: score(reference, tokens))


async def test_few_snapshots_are_those_used_last(tmp_path: Path) -> None:
    """Room for one: the states of an earlier prompt are lost, and answers stay the same."""
    reference, folder = reference_and_folder("Mamba2ForCausalLM", tmp_path)
    prompts = [PROMPTS[2], PROMPTS[2][7:], PROMPTS[2]]
    async with AsyncEngine(config(folder, device="cpu", cpu_kvcache_space=0.0004)) as engine:
        assert engine.core.info.num_snapshots == 1
        answers = [await answer(engine, prompt) for prompt in prompts]
    assert [output.num_cached_tokens for output in answers] == [0, 0, 0]
    for prompt, output in zip(prompts, answers, strict=True):
        check(prompt, output, lambda tokens: score(reference, tokens))


@pytest.mark.parametrize(
    ("conv", "ssm", "sizes"),
    [
        ("auto", "auto", (4, 4)), ("float16", "auto", (2, 2)), ("auto", "bfloat16", (4, 2)),
        ("bfloat16", "float32", (2, 4)),
    ],
)  # fmt: skip
async def test_states_have_the_type_that_is_asked_for(
    conv: str, ssm: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    """Memory counts its bytes, up to the last one; answers stay near."""
    reference, folder = reference_and_folder("Mamba2ForCausalLM", tmp_path)
    layers, inner, size = reference.config.num_hidden_layers, 8 * 16, 12
    slot = layers * (sizes[0] * 3 * (inner + 2 * GROUPS * size) + sizes[1] * inner * size)
    options: dict[str, Any] = {
        "device": "cpu", "max_num_seqs": 3, "enable_prefix_caching": False,
        "mamba_cache_dtype": conv, "mamba_ssm_cache_dtype": ssm,
    }  # fmt: skip
    with pytest.raises(OutOfMemory):
        async with AsyncEngine(config(folder, cpu_kvcache_space=(4 * slot - 1) / 2**30, **options)):
            pass
    async with AsyncEngine(config(folder, cpu_kvcache_space=4 * slot / 2**30, **options)) as engine:
        output = await answer(engine, PROMPTS[2])
    (chosen,) = output.outputs
    wanted = score(reference, PROMPTS[2] + chosen.token_ids)[len(PROMPTS[2]) - 1 : -1]
    told = [
        row[token].logprob for token, row in zip(chosen.token_ids, chosen.logprobs, strict=True)
    ]
    kept = [float(row[token]) for token, row in zip(chosen.token_ids, wanted, strict=True)]
    exact = sizes == (4, 4)
    assert (told == pytest.approx(kept, abs=1e-4)) == exact
    assert told == pytest.approx(kept, abs=0.1)


@pytest.mark.parametrize("name", ["mamba_cache_dtype", "mamba_ssm_cache_dtype"])
async def test_types_of_states_need_states(name: str, tmp_path: Path) -> None:
    folder = checkpoint(make_reference("LlamaForCausalLM", {}), "LlamaForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="keeps no states") as caught:
        async with AsyncEngine(config(folder, **{name: "bfloat16"})):
            pass
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"kv_compression": "key_norm", "enable_prefix_caching": False}, "kv_compression"),
        (
            {"kv_transfer_config": {"kv_connector": "cpu_offload", "kv_role": "kv_both"}},
            "kv_transfer_config",
        ),
        ({"device": "cpu", "max_num_seqs": 8, "cpu_kvcache_space": 0.0001}, "max_num_seqs"),
    ],
    ids=["compression", "connector", "too many states"],
)
async def test_what_states_do_not_allow_is_refused_by_name(
    options: dict[str, Any], param: str, tmp_path: Path
) -> None:
    _, folder = reference_and_folder("Mamba2ForCausalLM", tmp_path)
    with pytest.raises((ConfigError, OutOfMemory)) as caught:
        async with AsyncEngine(config(folder, **options)):
            pass
    assert caught.value.param == param


@pytest.mark.parametrize("case", ["Qwen3NextForCausalLM", "LaraMiniForCausalLM"])
async def test_another_activation_behind_convolutions_is_refused(case: str, tmp_path: Path) -> None:
    _, folder = reference_and_folder(case, tmp_path)
    overrides = {"hidden_act": "gelu_pytorch_tanh"}
    with pytest.raises(ConfigError, match="hidden_act") as caught:
        async with AsyncEngine(config(folder, hf_overrides=overrides)):
            pass
    assert caught.value.param == "hidden_act"


def as_minimax_m1(folder: Path) -> dict[str, Any]:
    """Give a checkpoint of MiniMax the configuration of its remote code, and no constants."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(CONSTANTS)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    own = json.loads(path.read_text())
    words = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    for ours, theirs in words.items():
        for factor in ("alpha", "beta"):
            own[f"layernorm_{theirs}_{factor}"] = own.pop(f"{ours}_{factor}_factor")
    own["attn_type_list"] = [int(kind == "full_attention") for kind in own.pop("layer_types")]
    own["rope_theta"] = own.pop("rope_parameters")["rope_theta"]
    own |= {
        "architectures": ["MiniMaxM1ForCausalLM"], "model_type": "minimax_m1", "postnorm": True,
        "rotary_dim": 16, "shared_intermediate_size": 0,
    }  # fmt: skip
    path.write_text(json.dumps(own))
    return own


async def test_minimax_m1_is_served_by_the_names_of_its_remote_code(tmp_path: Path) -> None:
    reference, folder = reference_and_folder("MiniMaxForCausalLM", tmp_path)
    own = as_minimax_m1(folder)
    async with AsyncEngine(config(folder, num_gpu_blocks_override=96)) as engine:
        output = await answer(engine, PROMPTS[2])
    check(PROMPTS[2], output, lambda tokens: score(reference, tokens))
    (folder / "config.json").write_text(json.dumps(own | {"rotary_dim": 8}))
    model: Any = PagedModel(folder, "float32").model
    assert model.model.rotaries[0].rotary_dim == 8
    for field, value in (("postnorm", False), ("shared_intermediate_size", [0, 96, 0])):
        (folder / "config.json").write_text(json.dumps(own | {field: value}))
        with pytest.raises(ConfigError) as caught:
            PagedModel(folder, "float32")
        assert caught.value.param == field


async def test_kimi_linear_is_served_by_its_own_configuration(tmp_path: Path) -> None:
    """Its lists of layers begin with 1, and its fields have other names."""
    reference, folder = reference_and_folder("KimiLinearForCausalLM", tmp_path)
    path = folder / "config.json"
    own = json.loads(path.read_text())
    for name in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads",
                 "linear_conv_kernel_dim"):  # fmt: skip
        own.pop(name)
    own |= {
        "first_k_dense_replace": 1, "mla_use_nope": True, "linear_attn_config": {
            "head_dim": 12, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1, 3],
            "full_attn_layers": [2],
        },
    }  # fmt: skip
    path.write_text(json.dumps(own))
    async with AsyncEngine(config(folder, num_gpu_blocks_override=96)) as engine:
        output = await answer(engine, PROMPTS[2])
    check(PROMPTS[2], output, lambda tokens: score(reference, tokens))
    path.write_text(json.dumps(own | {"mla_use_nope": False}))
    with pytest.raises(ConfigError) as caught:
        PagedModel(folder, "float32")
    assert caught.value.param == "mla_use_nope"


def test_lfm3_has_gates_or_biases(tmp_path: Path) -> None:
    _, folder = reference_and_folder("Lfm3ForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="use_attention_gate") as caught:
        PagedModel(folder, "float32", hf_overrides={"attention_bias": True})
    assert caught.value.param == "attention_bias"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("linear_key_head_dim", 0, "which is no size"),
        ("linear_num_key_heads", -1, "which is no size"),
        ("linear_conv_kernel_dim", 2**31, "which is no size"),
        ("linear_num_value_heads", 3, "multiple of `?linear_num_key_heads"),
    ],
)
@pytest.mark.parametrize("case", ["Qwen3NextForCausalLM", "LaraMiniForCausalLM"])
def test_sizes_of_delta_nets_are_refused_by_name(
    case: str, field: str, value: int, message: str, tmp_path: Path
) -> None:
    folder = checkpoint(make_reference(case, CASES[case]), case, tmp_path)
    edit_json(folder / "config.json", **{field: value})
    with pytest.raises(ConfigError, match=f"{field}.*{message}"):
        PagedModel(folder, "float32")


def test_operations_without_a_sigmoid_gate_are_refused_by_name() -> None:
    class Plain(Operations):
        name = "plain"
        features = Operations.features - {"gated_rms_norm.sigmoid"}

    build = BuildContext(torch.device("cpu"), torch.float32, Plain())
    with pytest.raises(ConfigError, match=r"'plain' lacks gated_rms_norm\.sigmoid") as refused:
        KimiDeltaAttention(32, 2, 8, 4, build, eps=1e-6, rank=None)
    assert refused.value.param == "operations"

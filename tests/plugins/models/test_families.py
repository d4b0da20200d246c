"""Each family that differs little from another says what `transformers` says, through the engine.

What all families share is in the kit (test_model_kit.py); here is what each of them adds. A case's
first part is the architecture, the second one what it shows.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from nights import some_by_day
from safetensors.torch import load_file

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError
from jackfield.core.loading.build import build_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.loading.quantize import quantized_layers
from jackfield.core.nn.operations import Operations
from jackfield.core.worker.hidden_states import parts
from jackfield.plugins.conformance.divided_models import check_ranks, check_stages
from jackfield.plugins.conformance.invariant_model import check_batch_invariance
from jackfield.plugins.conformance.kit import Kit
from jackfield.plugins.conformance.models import tiny
from jackfield.plugins.conformance.paged_model import VOCAB, PagedModel
from jackfield.plugins.conformance.updated_model import check_update

from helpers import at_once

LEFT_OUT = ...
"""Of a field of the kit's tiny configuration that a family cannot take."""
CASES: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": {},
    "Apertus1p5TextForCausalLM": {"vocab_size": VOCAB + 20, "output_vocab_size": VOCAB},
    "ArceeForCausalLM": {},
    "BioGptForCausalLM": {},
    "BloomForCausalLM": {},
    "CodeGenForCausalLM": {"rotary_dim": 8},
    "Cohere2ForCausalLM": {
        "logit_scale": 0.5,
        "sliding_window": 12,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "CohereForCausalLM": {"logit_scale": 0.5},
    "CohereForCausalLM:head norms": {"use_qk_norm": True, "tie_word_embeddings": False},
    "CwmForCausalLM": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "DiffLlamaForCausalLM": {"tie_word_embeddings": False},
    "DiffLlamaForCausalLM:many keys": {"num_key_value_heads": 4, "attention_bias": True},
    "Ernie4_5ForCausalLM": {"use_bias": True},
    "Exaone4ForCausalLM": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Exaone4ForCausalLM:no windows": {
        "sliding_window": None,
        "layer_types": ["full_attention", "full_attention", "full_attention"],
    },
    "FalconForCausalLM": {
        "head_dim": LEFT_OUT,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "ffn_hidden_size": 96,
    },
    "FalconForCausalLM:one key": {"head_dim": LEFT_OUT, "multi_query": True},
    "FalconForCausalLM:one norm": {
        "head_dim": LEFT_OUT,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "bias": True,
    },
    "FalconForCausalLM:slopes": {
        "head_dim": LEFT_OUT,
        "multi_query": False,
        "alibi": True,
        "parallel_attn": False,
        "bias": True,
        "num_kv_heads": 4,
    },
    "GPT2LMHeadModel": {"scale_attn_by_inverse_layer_idx": True},
    "GPTBigCodeForCausalLM": {"multi_query": True},
    "GPTBigCodeForCausalLM:many keys": {"multi_query": False, "n_inner": 48},
    "GPTJForCausalLM": {"rotary_dim": 8, "tie_word_embeddings": False},
    "GPTJForCausalLM:tied": {"rotary_dim": 8, "tie_word_embeddings": True},
    "GPTNeoForCausalLM": {
        "attention_types": [[["global", "local"], 1], [["global"], 1]],
        "window_size": 12,
    },
    "GPTNeoXForCausalLM": {"use_parallel_residual": True},
    "GPTNeoXForCausalLM:serial": {
        "use_parallel_residual": False,
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
    "GPTNeoXJapaneseForCausalLM": {
        "intermediate_multiple_size": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 5,
        "intermediate_size": [96, 80, 96, 96, 96],
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB - 20,
        "num_kv_shared_layers": 1,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0, 0.0],
    },
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 7,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
        "num_key_value_heads": 1,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 3.0,
    },
    "Gemma4UnifiedForCausalLM": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 4,
        "attention_k_eq_v": True,
    },
    "Gemma4ForCausalLM:experts": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 3,
        "moe_intermediate_size": 48,
    },
    "GlmForCausalLM": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "GraniteSWAForCausalLM": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.6,
        "logits_scaling": 2.5,
        "layer_rope_theta": [100.0, 0.0, 10000.0],
    },
    "HeliumForCausalLM": {},
    "HunYuanDenseV1ForCausalLM": {
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 50.0,
            "factor": 1.0,
        }
    },
    "HyperCLOVAXForCausalLM": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.6,
        "logits_scaling": 2.5,
    },
    "Jais2ForCausalLM": {},
    "Ministral3ForCausalLM": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        }
    },
    "MinistralForCausalLM": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "MptForCausalLM": {"attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.3}},
    "MptForCausalLM:six heads": {"n_heads": 6, "d_model": 96},
    "NanoChatForCausalLM": {},
    "NemotronForCausalLM": {"mlp_bias": True},
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2},
    "OlmoForCausalLM": {"clip_qkv": 1.5},
    "PersimmonForCausalLM": {"qk_layernorm": True},
    "PhiForCausalLM": {},
    "PhiForCausalLM:head norms": {"qk_layernorm": True},
    "PhiForCausalLM:tied": {"tie_word_embeddings": True},
    "SeedOssForCausalLM": {"attention_out_bias": True},
    "SmolLM3ForCausalLM": {
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "Starcoder2ForCausalLM": {"sliding_window": 12, "use_bias": True},
    "VaultGemmaForCausalLM": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 40,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "HrmTextForCausalLM": {
        "num_hidden_layers": 2,
        "H_cycles": 2,
        "L_cycles": 3,
        "prefix_lm": False,
        "embedding_scale": 20.0,
    },
    "OpenAIGPTLMHeadModel": {},
    "XGLMForCausalLM": {"ffn_dim": 96, "init_std": 0.2},
}
EAGER_IS_WRONG = {"FalconForCausalLM:slopes": "sdpa"}
"""Falcon's eager attention of transformers 5.23 adds the slopes twice."""
TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2]))
RIGHT_SINCE = {"GPTNeoXJapaneseForCausalLM": (5, 18)}
"""transformers 5.17 makes angles for all channels, and rotates a part of them."""
PROMPTS = [[3 + (7 * i * n) % (VOCAB - 3) for i in range(1, n)] for n in (6, 42)]
OUTPUT = 3


def make_reference(case: str, changes: Mapping[str, Any] | None = None) -> Any:
    """A random model whose every parameter counts, float32, eager attention. `changes`: of its
    tiny configuration, if not those of CASES."""
    name = case.partition(":")[0]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    if TRANSFORMERS < RIGHT_SINCE.get(name, TRANSFORMERS):
        pytest.skip(f"transformers {transformers.__version__} does not run its own {name}")
    kind = getattr(transformers, name)
    fields = {**tiny(kind.config_class), **(CASES[case] if changes is None else changes)}
    config = kind.config_class(**{k: v for k, v in fields.items() if v is not LEFT_OUT})
    config._attn_implementation = EAGER_IS_WRONG.get(case, "eager")
    torch.manual_seed(7)
    model = kind(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.any() and parameter.dim() > 1:
                # transformers 5.17 leaves ERNIE's routers at zero, where all experts tie.
                parameter.normal_(std=0.5)
            if parameter.dim() == 1 or "norm" in name:
                parameter.add_((0.3 if "bias" in name else 0.1) * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    for name, module in model.named_modules():
        if name.endswith("embed_tokens_per_layer"):
            # Gemma 3n's text alone looks up tokens beyond the table in transformers 5.17.
            module.register_forward_pre_hook(
                lambda table, inputs: (inputs[0].where(inputs[0] < table.num_embeddings, 0),)
            )
    return model


def checkpoint(reference: Any, architecture: str, folder: Path) -> Path:
    """Save a model, to be served as `architecture`."""
    reference.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture]}))
    return folder


@torch.no_grad()
def score(model: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab] float32 log-probabilities"""
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


async def check_engine(folder: Path, expected: Callable[[list[int]], torch.Tensor]) -> None:
    """Both prompts at once, the long one in chunks, and again from the cache of prefixes."""
    config = EngineConfig(
        model=str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=64,
        max_num_seqs=4, max_num_batched_tokens=16, block_size=4, num_gpu_blocks_override=96,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=1)

    async def answer(engine: AsyncEngine, prompt: list[int]) -> Any:
        *_, last = [output async for output in engine.generate(prompt, params)]
        return last

    async with AsyncEngine(config) as engine:
        answers = await at_once(engine, *(answer(engine, prompt) for prompt in PROMPTS))
        again = await answer(engine, PROMPTS[1])
    assert again.num_cached_tokens >= 36
    for prompt, output in zip([*PROMPTS, PROMPTS[1]], [*answers, again], strict=True):
        chosen = output.outputs[0]
        wanted = expected(prompt + chosen.token_ids)[len(prompt) - 1 : -1]
        for row, token, told in zip(wanted, chosen.token_ids, chosen.logprobs, strict=True):
            assert float(row.max() - row[token]) <= 1e-3
            assert told[token].logprob == pytest.approx(float(row[token]), abs=1e-3)


def check_divided(folder: Path, architecture: str) -> None:
    """Two ranks, and two stages, compute what one rank does."""
    check_ranks(folder, architecture, 2, Kit.plugins(), 2e-4)
    check_stages(folder, 2, Kit.plugins())


def check_changed(folder: Path) -> None:
    """Other weights in place, and any batch, change no bit."""
    check_update(folder, Kit.plugins())
    check_batch_invariance(folder, Kit.plugins())


def check_names(folder: Path, model: Any) -> None:
    """Errors and quantization call tensors by their names in the checkpoint."""
    for name in load_file(folder / "model.safetensors"):
        said = model.weight_map.source(*model.weight_map.target(name))
        head = name == "lm_head.bias" or said.startswith("lm_head.")
        assert head or name.endswith(said.split(".", 1)[1]), (name, said)


def check_logits(folder: Path, reference: Any) -> None:
    """Every position of a prompt in two steps: in float32, and in bfloat16 about as near as the
    reference comes in bfloat16."""
    prompt = PROMPTS[1]
    want = score(reference, prompt)
    rounded = score(copy.deepcopy(reference).to(torch.bfloat16), prompt)
    for dtype, bound in (("float32", 1e-3), ("bfloat16", 3 * float((rounded - want).abs().max()))):
        model = PagedModel(folder, dtype)
        got = torch.cat([model.run({0: part})[0] for part in (prompt[:11], prompt[11:])])
        torch.testing.assert_close(got.log_softmax(-1).cpu(), want, atol=bound, rtol=0)
    # As stages send them.
    assert {part.dtype for part in parts(model.hidden({1: prompt}))} == {torch.bfloat16}
    check_names(folder, model.model)


@pytest.mark.parametrize("case", CASES)
async def test_a_family_equals_transformers(case: str, tmp_path: Path) -> None:
    reference = make_reference(case)
    folder = checkpoint(reference, case.partition(":")[0], tmp_path)
    check_logits(folder, reference)
    await check_engine(folder, lambda tokens: score(reference, tokens))


DIVIDED_BY_DAY = (
    "BloomForCausalLM", "DiffLlamaForCausalLM", "FalconForCausalLM:slopes",
    "Gemma3nForCausalLM", "Gemma4ForCausalLM", "Gemma4ForCausalLM:experts",
    "GPT2LMHeadModel", "GPTJForCausalLM:tied", "HrmTextForCausalLM", "MptForCausalLM",
    "OpenAIGPTLMHeadModel",
)  # fmt: skip
"""Whose layers are not made of the parts that most families have."""


@pytest.mark.parametrize("case", some_by_day(CASES, DIVIDED_BY_DAY))
def test_a_family_is_the_same_divided_and_changed(case: str, tmp_path: Path) -> None:
    architecture = case.partition(":")[0]
    folder = checkpoint(make_reference(case), architecture, tmp_path)
    check_divided(folder, architecture)
    check_changed(folder)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(
    "case", ["DiffLlamaForCausalLM", pytest.param("HrmTextForCausalLM", marks=pytest.mark.slow)]
)
def test_kernels_equal_transformers(case: str, tmp_path: Path) -> None:
    """A prompt in two steps, beside a decode row in the second one, and a step of decode rows."""
    pytest.importorskip("triton")
    reference = make_reference(case)
    model = PagedModel(checkpoint(reference, case, tmp_path), "float32", kernels="triton")
    first, other = PROMPTS[1], PROMPTS[0]
    steps = (
        {0: first[:20], 1: other[:4]}, {1: other[4:5], 0: first[20:40]}, {0: first[40:], 1: [9]},
    )  # fmt: skip
    results = [model.run(step) for step in steps]
    for slot, tokens in ((0, first), (1, [*other, 9])):
        got = torch.cat([result[slot] for result in results]).log_softmax(-1).cpu()
        torch.testing.assert_close(got, score(reference, tokens), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("DiffLlamaForCausalLM", "num_key_value_heads", 1),
        ("HrmTextForCausalLM", "prefix_lm", True),
        ("HrmTextForCausalLM", "attention_bias", True),
        ("HrmTextForCausalLM", "L_cycles", 0),
        ("OpenAIGPTLMHeadModel", "afn", "tanh"),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(
    case: str, field: str, value: Any, tmp_path: Path
) -> None:
    folder = checkpoint(make_reference(case), case, tmp_path)
    with pytest.raises(ConfigError, match=field) as caught:
        PagedModel(folder, "float32", load_format="dummy", hf_overrides={field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("case", ["GPT2LMHeadModel", "GPTNeoXForCausalLM", "ApertusForCausalLM"])
def test_weights_put_in_order_are_rounded_in_that_order(case: str, tmp_path: Path) -> None:
    folder = checkpoint(make_reference(case), case, tmp_path)

    def build(**options: Any) -> Any:
        config = EngineConfig(model=str(folder), device="cpu", dtype="float32", **options)
        model_config = resolve_model_config(config)
        cpu = torch.device("cpu")
        return build_model(Kit.plugins(), config, model_config, cpu, Operations())

    plain, layers = build(), quantized_layers(build(quantization="fp8"))
    assert len(layers) == 3 * 4, "two products of attention and two of the MLP, in each layer"
    for name, layer in layers.items():
        weight = plain.get_submodule(name).weight
        rounded = layer.rows(torch.arange(len(weight)))
        assert 0 < float((rounded - weight).norm() / weight.norm()) < 0.05


def test_a_layer_that_would_read_a_cache_that_none_keeps_is_refused(tmp_path: Path) -> None:
    case = "Gemma4ForCausalLM"
    folder = checkpoint(make_reference(case), case, tmp_path)
    content = json.loads((folder / "config.json").read_text())
    content["num_kv_shared_layers"] = 6  # All full ones are among them.
    (folder / "config.json").write_text(json.dumps(content))
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match=r"layer 1 .* 'full_attention'") as caught:
        build_model(
            Kit.plugins(), config, resolve_model_config(config), torch.device("cpu"), Operations()
        )
    assert caught.value.param == "num_kv_shared_layers"

"""Families whose attention caches latents say what `transformers` says, through the engine."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from nights import some_by_day
from safetensors.torch import load_file, save_file
from test_families import (
    LEFT_OUT,
    PROMPTS,
    check_changed,
    check_divided,
    check_engine,
    check_logits,
    checkpoint,
    make_reference,
    score,
)

from jackfield.core.errors import ConfigError
from jackfield.plugins.conformance.models import tiny
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.conformance.rank_threads import run_ranks, thread_ranks

LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "num_key_value_heads": 4, "head_dim": LEFT_OUT,
}  # fmt: skip
MIXTURE = {
    **LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.7,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
V2 = {**MIXTURE, "n_shared_experts": 2, "first_k_dense_replace": 1}
V3 = {
    **MIXTURE, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "norm_topk_prob": True,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": {**V3, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "DeepseekV2ForCausalLM": {
        **V2, "q_lora_rank": None, "topk_method": "greedy",
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "DeepseekV2ForCausalLM:groups": {
        **V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "attention_bias": True,
    },
    "DeepseekV3ForCausalLM": {
        **V3, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "DeepseekV3ForCausalLM:halves": {**V3, "q_lora_rank": None, "rope_interleave": False},
    "Glm4MoeLiteForCausalLM": {
        **MIXTURE, "mlp_layer_types": ["dense", "sparse", "sparse"], "norm_topk_prob": True,
    },
    "LongcatFlashForCausalLM": {
        **LATENT, "num_layers": 2, "num_hidden_layers": LEFT_OUT, "head_dim": 8, "moe_topk": 4,
        "n_routed_experts": 6, "zero_expert_num": 3, "expert_ffn_hidden_size": 48,
        "ffn_hidden_size": 80, "intermediate_size": LEFT_OUT, "routed_scaling_factor": 1.7,
    },
    "MiniCPM3ForCausalLM": {
        **LATENT, "scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 32,
    },
    "Mistral4ForCausalLM": {
        **V3, "n_group": 1, "topk_group": 1,
        "rope_parameters": {
            **YARN, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "YoutuForCausalLM": LATENT,
}  # fmt: skip


def latent_reference(case: str, changes: Mapping[str, Any] | None = None) -> Any:
    """`make_reference`, with biases that decide which experts are chosen."""
    if not hasattr(transformers, case.partition(":")[0]):
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    model = make_reference(case, CASES[case] if changes is None else changes)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model


@pytest.mark.parametrize("case", CASES)
async def test_a_family_equals_transformers(case: str, tmp_path: Path) -> None:
    reference = latent_reference(case)
    folder = checkpoint(reference, case.partition(":")[0], tmp_path)
    check_logits(folder, reference)
    await check_engine(folder, lambda tokens: score(reference, tokens))


DIVIDED_BY_DAY = ("DeepseekV2ForCausalLM", "LongcatFlashForCausalLM")


@pytest.mark.parametrize("case", some_by_day(CASES, DIVIDED_BY_DAY))
def test_a_family_is_the_same_divided_and_changed(case: str, tmp_path: Path) -> None:
    architecture = case.partition(":")[0]
    folder = checkpoint(latent_reference(case), architecture, tmp_path)
    check_divided(folder, architecture)
    check_changed(folder)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(
    "case",
    ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM:halves", "LongcatFlashForCausalLM"],
)
def test_kernels_equal_transformers(case: str, tmp_path: Path) -> None:
    """A prompt in two steps, beside a decode row in the second one, and a step of decode rows."""
    pytest.importorskip("triton")
    reference = latent_reference(case)
    model = PagedModel(
        checkpoint(reference, case.partition(":")[0], tmp_path), "float32", kernels="triton"
    )
    first, other = PROMPTS[1], PROMPTS[0]
    steps = (
        {0: first[:20], 1: other[:4]}, {1: other[4:5], 0: first[20:40]}, {0: first[40:], 1: [9]},
    )  # fmt: skip
    results = [model.run(step) for step in steps]
    for slot, tokens in ((0, first), (1, [*other, 9])):
        got = torch.cat([result[slot] for result in results]).log_softmax(-1).cpu()
        torch.testing.assert_close(got, score(reference, tokens), atol=1e-3, rtol=0)


async def test_kimi_k2_is_v3_by_another_model_type(tmp_path: Path) -> None:
    """As its config.json is: a rotation by the older names, and no groups; whatever it says of a
    head's size, the shared part of keys is rotated."""
    case = "DeepseekV3ForCausalLM"
    changes = {"n_group": 1, "topk_group": 1}
    reference = latent_reference(case, {**CASES[case], **changes})
    folder = checkpoint(reference, case, tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    for name in ("qk_head_dim", "num_mtp_layers"):
        config.pop(name, None)
    more = {"model_type": "kimi_k2", "num_nextn_predict_layers": 0, "head_dim": 16}
    path.write_text(json.dumps(config | more))
    await check_engine(folder, lambda tokens: score(reference, tokens))


@pytest.mark.parametrize("ranks", [1, 2])
def test_fp8_blocks_are_multiplied_as_dequantised(ranks: int, tmp_path: Path) -> None:
    """Every linear layer of V3 in blocks of 128 x 128; up-projections of heads fill whole blocks
    and are kept dequantised."""
    sizes = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
    changes = {
        **CASES["DeepseekV3ForCausalLM"], **sizes, "moe_intermediate_size": 256,
        "intermediate_size": 256, "num_hidden_layers": 2,
    }  # fmt: skip
    reference = latent_reference("DeepseekV3ForCausalLM", changes)
    folder = checkpoint(reference, "DeepseekV3ForCausalLM", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    stored, plain = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        plain[name] = stored[name] = tensor
        if tensor.dim() == 2 and "layers" in name and ".mlp.gate." not in name:
            rounded, scale = to_blocks(tensor)
            stored[name], stored[f"{name}_scale_inv"] = rounded, scale
            spread = scale.repeat_interleave(128, 0)[: len(tensor)].repeat_interleave(128, 1)
            plain[name] = rounded.float() * spread[:, : tensor.shape[1]]
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    del config["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    want = PagedModel(tmp_path / "plain", "float32")
    models = [PagedModel(folder, "float32", ranks=rank) for rank in thread_ranks(ranks)]
    attention = models[0].model.model.layers[0].self_attn
    assert attention.kv_b_proj is None and attention.up.dtype == torch.float32
    for step in ({0: PROMPTS[1], 1: PROMPTS[0]}, {0: [7], 1: [9]}):
        expected = want.run(step)
        for got in run_ranks([functools.partial(model.run, step) for model in models]):
            for slot, logits in expected.items():
                torch.testing.assert_close(got[slot], logits, atol=2e-3, rtol=1e-3)


def to_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """→ float8_e4m3fn of the same shape, and a factor of each block of 128 x 128"""
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, 128, columns, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    rounded = (blocks / scale[:, None, :, None]).view(rows * 128, columns * 128)
    kept = rounded[: weight.shape[0], : weight.shape[1]].contiguous()
    return kept.to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("DeepseekV2ForCausalLM", "topk_method", "noaux_tc"),
        ("DeepseekV2ForCausalLM", "norm_topk_prob", True),
        ("DeepseekV3ForCausalLM", "qk_rope_head_dim", 7),
        ("DeepseekV3ForCausalLM", "kv_lora_rank", 0),
        ("DeepseekV3ForCausalLM", "q_lora_rank", 0),
        ("DeepseekV3ForCausalLM:halves", "attention_bias", True),
        ("LongcatFlashForCausalLM", "zero_expert_type", "drop"),
        ("LongcatFlashForCausalLM", "router_bias", True),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    architecture: str, field: str, value: Any, tmp_path: Path
) -> None:
    kind = getattr(transformers, architecture.partition(":")[0]).config_class
    fields = {**tiny(kind), **CASES[architecture]}
    config = kind(**{k: v for k, v in fields.items() if v is not LEFT_OUT}).to_dict()
    config |= {"architectures": [architecture.partition(":")[0]], field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        PagedModel(tmp_path, "float32", load_format="dummy")
    assert caught.value.param == field


@pytest.mark.parametrize("field", ["all2all_backend", "enable_eplb"])
def test_experts_that_compute_nothing_neither_move_nor_get_tokens_of_other_ranks(
    field: str, tmp_path: Path
) -> None:
    case = "LongcatFlashForCausalLM"
    folder = checkpoint(latent_reference(case), case, tmp_path)
    moves = field == "enable_eplb"
    ranks = dataclasses.replace(
        thread_ranks(2, expert_parallel=True)[0],
        all2all=None if moves else cast(Any, SimpleNamespace(size=2)),
    )
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": moves}
    with pytest.raises(ConfigError, match="experts that compute nothing") as caught:
        PagedModel(folder, "float32", ranks=ranks, **options)
    assert caught.value.param == field


def test_longcat_without_factors_of_latents_and_with_layers_that_predict_further(
    tmp_path: Path,
) -> None:
    case = "LongcatFlashForCausalLM"
    reference = latent_reference(case)
    folder = checkpoint(reference, case, tmp_path)
    path, weights = folder / "config.json", folder / "model.safetensors"
    flags = {"mla_scale_q_lora": False, "mla_scale_kv_lora": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | flags))
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if name.endswith(("q_a_layernorm.weight", "kv_a_layernorm.weight")):
            tensor.mul_((64 / len(tensor)) ** 0.5)
    further = {"model.mtp.layers.0.eh_proj.weight": torch.ones(64, 128)}
    save_file(tensors | further, weights, {"format": "pt"})
    got = PagedModel(folder, "float32").run({0: PROMPTS[1]})[0].log_softmax(-1).cpu()
    torch.testing.assert_close(got, score(reference, PROMPTS[1]), atol=1e-3, rtol=0)

"""Families that `transformers` does not have, nor an equal of theirs, say what their published
formulas say, in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from formulas import (
    COMMON,
    EPS,
    HIDDEN,
    LAYERS,
    SIZE,
    Family,
    Tensors,
    Weights,
    attend,
    below,
    blocks,
    frequencies,
    largest,
    rms,
    swiglu,
    turn,
)
from formulas_of_dense import (
    LOOP,
    OURO,
    PLAMO,
    SOLAR,
    STEP_1,
    draw_loop,
    draw_ouro,
    draw_plamo,
    draw_solar,
    draw_step_1,
    loop_coder,
    ouro,
    plamo,
    root_slopes,
    solar,
    step_1_block,
)
from formulas_of_latents import LING, PANGU, draw_ling, draw_pangu, ling_block, pangu_block
from formulas_of_states import PUZZLE, draw_puzzle, puzzle_block
from formulas_of_step import STEP, STEP_3, draw_step, draw_step_3, step_3_block, step_block
from nights import some_by_day
from safetensors.torch import save_file
from test_families import (
    PROMPTS,
    check_changed,
    check_divided,
    check_engine,
    check_names,
)

from jackfield.core.errors import ConfigError
from jackfield.plugins.conformance.paged_model import VOCAB, PagedModel
from jackfield.plugins.models.parts import alibi_slopes

ARCTIC: dict[str, Any] = COMMON | {
    "model_type": "arctic", "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "rope_theta": 500.0, "num_local_experts": 8,
    "num_experts_per_tok": 2, "moe_layer_frequency": 1, "parallel_attn_mlp_res": True,
}  # fmt: skip


def draw_arctic() -> Tensors:
    weights = Weights()
    for layer in range(LAYERS):
        here = f"model.layers.{layer}"
        for name, rows in (("q", HIDDEN), ("k", 32), ("v", 32), ("o", HIDDEN)):
            weights.matrix(f"{here}.self_attn.{name}_proj", rows, HIDDEN)
        for name in ("input", "post_attention", "residual"):
            weights.norm(f"{here}.{name}_layernorm", HIDDEN)
        weights.matrix(f"{here}.block_sparse_moe.gate", 8, HIDDEN, scale=0.5)
        experts = [(f"block_sparse_moe.experts.{expert}", 48) for expert in range(8)]
        for name, inner in (*experts, ("residual_mlp", HIDDEN)):
            weights.mlp(f"{here}.{name}", HIDDEN, inner, parts=("w1", "w3", "w2"))
    return weights.tensors


def arctic_block(x: torch.Tensor, layer: int, w: Tensors) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms(x, w[f"{name}_layernorm.weight"], EPS)

    def mlp(x: torch.Tensor, name: str) -> torch.Tensor:
        return swiglu(x, below(w, f"{name}."), parts=("w1", "w3", "w2"))

    normed = norm(x, "post_attention")
    scores = (normed @ w["block_sparse_moe.gate.weight"].T).softmax(-1)
    weights = largest(scores, 2)
    weights = weights / weights.sum(-1, keepdim=True)
    routed = torch.zeros_like(x)
    for expert, factor in enumerate(weights.T[:, :, None]):
        routed = routed + factor * mlp(normed, f"block_sparse_moe.experts.{expert}")
    normed = norm(x, "input")
    q, k, v = (
        (normed @ w[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, SIZE)) for name in "qkv"
    )
    angles = torch.outer(torch.arange(len(x)).double(), frequencies(SIZE, 500.0))
    heads = attend(turn(q, angles), turn(k, angles), v)
    x = x + heads.flatten(1) @ w["self_attn.o_proj.weight"].T
    return x + mlp(norm(x, "residual"), "residual_mlp") + routed


CASES = {
    "BailingMoeV2_5ForCausalLM": Family(
        LING,
        draw_ling,
        blocks(ling_block, 5),
        embedding="model.word_embeddings.weight",
        known_as="BailingHybridConfig",
    ),
    "ArcticForCausalLM": Family(ARCTIC, draw_arctic, blocks(arctic_block, LAYERS)),
    "IQuestLoopCoderForCausalLM": Family(LOOP, draw_loop, loop_coder),
    "OuroForCausalLM": Family(OURO, draw_ouro, ouro),
    "Plamo3ForCausalLM": Family(PLAMO, draw_plamo, plamo, offset=1.0),
    "SolarForCausalLM": Family(SOLAR, draw_solar, solar),
    "NemotronHPuzzleForCausalLM": Family(
        PUZZLE,
        draw_puzzle,
        blocks(puzzle_block, len(PUZZLE["block_configs"])),
        embedding="model.embeddings.weight",
        norm="model.norm_f.weight",
        known_as="NemotronHConfig",
    ),
    "PanguUltraMoEForCausalLM": Family(PANGU, draw_pangu, blocks(pangu_block, LAYERS)),
    "Step1ForCausalLM": Family(STEP_1, draw_step_1, blocks(step_1_block, LAYERS)),
    "Step3TextForCausalLM": Family(STEP_3, draw_step_3, blocks(step_3_block, LAYERS)),
    "Step3p5ForCausalLM": Family(STEP, draw_step, blocks(step_block, LAYERS), offset=1.0),
}


def write_config(case: str, folder: Path, **changes: Any) -> None:
    known_as = CASES[case].known_as
    if known_as is not None and not hasattr(transformers, known_as):
        pytest.skip(f"transformers {transformers.__version__} has no {known_as}")
    config = CASES[case].config | {"architectures": [case]} | changes
    (folder / "config.json").write_text(json.dumps(config))


def save(case: str, folder: Path) -> Tensors:
    """Write a checkpoint; return its tensors."""
    write_config(case, folder)
    family = CASES[case]
    tensors = family.draw()
    draw = torch.Generator().manual_seed(5)
    tensors |= {
        family.embedding: torch.randn(VOCAB, HIDDEN, generator=draw),
        family.norm: 1 - family.offset + 0.2 * torch.randn(HIDDEN, generator=draw),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=draw) * HIDDEN**-0.5,
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def scores(case: str, tensors: Tensors, tokens: list[int]) -> torch.Tensor:
    """→ log-probabilities [tokens, vocab_size]"""
    family = CASES[case]
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    x = wide[family.embedding][tokens]
    x = family.layers(x, below(wide, "model."))
    x = rms(x, family.offset + wide[family.norm], EPS)
    return (x @ wide["lm_head.weight"].T).log_softmax(-1).float()


@pytest.mark.parametrize("case", CASES)
async def test_a_family_says_what_its_formulas_say(case: str, tmp_path: Path) -> None:
    tensors = save(case, tmp_path)
    model = PagedModel(tmp_path, "float32")
    prompt = PROMPTS[1]
    got = torch.cat([model.run({0: part})[0] for part in (prompt[:11], prompt[11:])])
    torch.testing.assert_close(
        got.log_softmax(-1).cpu(), scores(case, tensors, prompt), atol=1e-4, rtol=0
    )
    check_names(tmp_path, model.model)
    await check_engine(tmp_path, lambda tokens: scores(case, tensors, tokens))


DIVIDED_BY_DAY = (
    "BailingMoeV2_5ForCausalLM", "NemotronHPuzzleForCausalLM", "Step1ForCausalLM",
    "Step3p5ForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize("case", some_by_day(CASES, DIVIDED_BY_DAY))
def test_a_family_is_the_same_divided_and_changed(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    check_divided(tmp_path, case)
    check_changed(tmp_path)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize(
    "case", ["BailingMoeV2_5ForCausalLM", "Step1ForCausalLM", "Step3p5ForCausalLM"]
)
def test_kernels_say_what_formulas_say(case: str, tmp_path: Path) -> None:
    """A prompt in two steps, beside a decode row in the second one, and a step of decode rows."""
    pytest.importorskip("triton")
    tensors = save(case, tmp_path)
    model = PagedModel(tmp_path, "float32", kernels="triton")
    first, other = PROMPTS[1], PROMPTS[0]
    steps = (
        {0: first[:20], 1: other[:4]}, {1: other[4:5], 0: first[20:40]}, {0: first[40:], 1: [9]},
    )  # fmt: skip
    results = [model.run(step) for step in steps]
    for slot, tokens in ((0, first), (1, [*other, 9])):
        got = torch.cat([result[slot] for result in results]).log_softmax(-1).cpu()
        torch.testing.assert_close(got, scores(case, tensors, tokens), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("ArcticForCausalLM", "moe_layer_frequency", 2),
        ("BailingMoeV2_5ForCausalLM", "use_linear_silu", True),
        ("OuroForCausalLM", "early_exit_threshold", 0.5),
        ("Plamo3ForCausalLM", "scale_embedding", True),
        ("Step3p5ForCausalLM", "att_impl_type", "MFA"),
        ("Step3p5ForCausalLM", "moe_router_activation", "relu"),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(
    case: str, field: str, value: Any, tmp_path: Path
) -> None:
    write_config(case, tmp_path, **{field: value})
    with pytest.raises(ConfigError) as caught:
        PagedModel(tmp_path, "float32", load_format="dummy")
    assert caught.value.param == field


def test_plamo_3_stretches_the_positions_of_layers_that_attend_to_all(tmp_path: Path) -> None:
    stretched = {"rope_scaling_factor": 4.0, "initial_context_length": 64}
    write_config("Plamo3ForCausalLM", tmp_path, **stretched)
    model: Any = PagedModel(tmp_path, "float32", load_format="dummy").model
    factors = [float(rotary.cos_sin[0, 0]) for rotary in model.model.rotaries]
    assert factors == pytest.approx([1.0, 1 + 0.1 * math.log(4), 1.0])


def test_step_1_has_slopes_for_any_number_of_heads() -> None:
    for heads in (8, 40, 48):
        assert alibi_slopes(heads) == pytest.approx(root_slopes(heads).tolist())

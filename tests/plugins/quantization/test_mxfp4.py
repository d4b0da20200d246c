"""MXFP4 checkpoints, written and read back here by the published layout."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from expert_moves import check_moves

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.loading.build import build_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.loading.quantize import quantized_layers
from jackfield.core.nn.activations import ClampedSwiGLU
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.quantized_weight import QuantizedWeight, dequantize
from jackfield.core.nn.routing import RoutingRule
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.divided_models import check_ranks

from helpers import edit_json, make_checkpoint, reference_model

HIDDEN, INNER, EXPERTS = 64, 96, 6
PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = "model.layers.1.mlp.experts.gate_up_proj_scales"


def e2m1(bits: int) -> float:
    """Sign, two bits of exponent (bias 1), one of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if sign else size


NUMBERS = torch.tensor([e2m1(bits) for bits in range(16)], dtype=torch.float64)


def decode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., G, 16] and [..., G] uint8 → [..., G * 32] float64"""
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    return (NUMBERS[nibbles] * torch.exp2(scales.double() - 127)[..., None]).flatten(-2)


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., K] → nearest numbers under a scale that cuts off none, blocks and scales."""
    groups = weight.double().unflatten(-1, (-1, 32))
    power = torch.log2(groups.abs().amax(-1).clamp(min=2.0**-120) / 6.0).ceil()
    scaled = groups / torch.exp2(power)[..., None]
    nibbles = (scaled[..., None] - NUMBERS).abs().argmin(-1).to(torch.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, (power + 127).to(torch.uint8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder as published ones are, `transformers` model with the dequantised weights)"""
    folder = tmp_path_factory.mktemp("mxfp4")
    make_checkpoint("gpt-oss", folder)
    model = reference_model(folder)
    tensors = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in list(tensors):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            # Stored with rows of outputs, the two halves' in turns.
            blocks, scales = encode(tensors.pop(name).transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameters[name].data.copy_(decode(blocks, scales).transpose(1, 2))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=PUBLISHED)
    return folder, model


def changed(
    checkpoint: tuple[Path, Any], into: Path, *, config: Any = None, **tensors: Any
) -> Path:
    """A copy with other tensors (None: without it) and fields of the quantization_config."""
    folder, _ = checkpoint
    data = json.loads((folder / "config.json").read_text())
    data["quantization_config"] |= config or {}
    (into / "config.json").write_text(json.dumps(data))
    merged = {**load_file(folder / "model.safetensors"), **tensors}
    merged = {name: tensor for name, tensor in merged.items() if tensor is not None}
    save_file(merged, into / "model.safetensors", {"format": "pt"})
    return into


def build(folder: Path, dtype: str = "float32", **options: Any) -> Any:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype=dtype, skip_tokenizer_init=True, **options
    )
    model_config = resolve_model_config(config)
    with torch.inference_mode():
        return build_model(load_plugins(), config, model_config, torch.device("cpu"), Operations())


def test_what_is_read_is_what_the_layout_says(
    checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit for bit, with all bytes and the smallest and largest scales among them."""
    folder, _ = checkpoint
    generator = torch.Generator().manual_seed(2)
    tensors = load_file(folder / "model.safetensors")
    blocks = torch.randint(0, 256, tensors[BLOCKS].shape, generator=generator).to(torch.uint8)
    scales = torch.randint(0, 252, blocks.shape[:-1], generator=generator).to(torch.uint8)
    scales[0, 0, :2] = torch.tensor([0, 251])
    tensors |= {BLOCKS: blocks, BLOCKS.replace("blocks", "scales"): scales}
    for layer, largest in ((0, 128), (2, 129)):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj_"
        stored = torch.randint(0, largest + 1, tensors[name + "scales"].shape, generator=generator)
        stored[1, 5, 1] = largest
        tensors[name + "scales"] = stored.to(torch.uint8)
        stored = torch.randint(0, 256, tensors[name + "blocks"].shape, generator=generator)
        tensors[name + "blocks"] = stored.to(torch.uint8)
    with caplog.at_level("INFO", "jackfield.loading"):
        layers = quantized_layers(build(changed(checkpoint, tmp_path, **tensors)))
    for layer in (0, 1, 2):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            expected = decode(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
            if part == "gate_up_proj":
                expected = torch.cat([expected[:, 0::2], expected[:, 1::2]], dim=1)
            actual = dequantize(layers[name].expert_weight, torch.float32)
            assert torch.equal(actual.double(), expected.flatten(0, 1))
    assert len(layers) == 6, "only experts are taken"
    bits = {
        name.removeprefix("model.layers."): layer.expert_weight.bits
        for name, layer in layers.items()
    }
    # In 4 bits, unless a scale is above 2, or a row's groups do not fit the words (96 columns).
    four = ["0.mlp.experts.gate_up_proj", "1.mlp.experts.gate_up_proj"]
    assert [name for name, count in bits.items() if count == 4] == four
    told = [text for text in caplog.messages if "4-bit floats are held in 8 bits" in text]
    assert len(told) == 4 and "2.mlp.experts.gate_up_proj: " in "".join(told)
    assert sum("a scale is above 2" in text for text in told) == 2


def test_transformers_reads_the_same(checkpoint: Any) -> None:
    """Its function for these tensors, which gives the columns as rows."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, _ = checkpoint
    tensors = load_file(folder / "model.safetensors")
    weight = quantized_layers(build(folder))[BLOCKS.removesuffix("_blocks")].expert_weight
    scales = tensors[BLOCKS.replace("blocks", "scales")]
    expected = convert_moe_packed_tensors(tensors[BLOCKS], scales, dtype=torch.float32)
    assert torch.equal(dequantize(weight, torch.float32), expected.transpose(1, 2).flatten(0, 1))


async def test_engine_gives_the_dequantised_models_log_probabilities(checkpoint: Any) -> None:
    folder, reference = checkpoint
    prompts = [[3 + (7 * i * n) % 190 for i in range(1, n + 1)] for n in (1, 9, 37)]
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True,
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, block_size=4,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)

    async def generate(prompt: list[int]) -> Any:
        async for output in engine.generate(prompt, params):
            last = output
        return last.outputs[0]

    async with AsyncEngine(config) as engine:
        responses = await asyncio.gather(*map(generate, prompts))
    for prompt, answer in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + answer.token_ids])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        for row, table in zip(expected, answer.logprobs, strict=True):
            assert len(table) >= 2
            for token, logprob in table.items():
                assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-3)


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_kernels_read_the_weights(checkpoint: Any, num_tokens: int) -> None:
    pytest.importorskip("triton")
    from jackfield.plugins.operations.experts import experts_serve
    from jackfield.plugins.operations.triton import TritonOperations

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    experts = build(checkpoint[0], "float16").to(device).model.layers[1].mlp.experts
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(device, torch.float16)
    logits = torch.randn(num_tokens, EXPERTS, generator=generator).to(device)
    routing = Operations().route(logits, RoutingRule(3, renormalize=True))
    weights = []
    for layer in (experts.gate_up_proj, experts.down_proj):
        # Moved as parameters, the weight's tensors are the module's.
        parts = {name: getattr(layer, name) for name in layer.weight.tensors()}
        weights.append(layer.weight._replace(**parts))
    assert all(isinstance(weight, QuantizedWeight) for weight in weights) and experts_serve(
        *weights
    )
    more = {
        "gate_up_bias": experts.gate_up_proj.bias,
        "down_bias": experts.down_proj.bias,
        "activation": ClampedSwiGLU(1.702, 0.75),
    }
    wide = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in more.items()}
    expected = Operations().experts(x.float(), routing, *weights, residual=x.float(), **wide)
    actual = TritonOperations().experts(x, routing, *weights, residual=x.clone(), **more)
    torch.testing.assert_close(actual.float(), expected, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"modules_to_not_convert": ["*.experts.gate*"], "bits": 8}, "bits"),
        ({"group_size": 16}, "group_size"),
    ],
)
def test_mismatched_config_is_refused_by_the_fields_name(
    checkpoint: Any, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        build(changed(checkpoint, tmp_path, config=changes))
    assert caught.value.param == f"quantization_config.{field}"


def test_rows_of_no_whole_groups_are_refused(checkpoint: Any, tmp_path: Path) -> None:
    edit_json(changed(checkpoint, tmp_path) / "config.json", intermediate_size=80)
    with pytest.raises(ConfigError, match=r"groups of 32 columns, and .*down_proj has 80"):
        build(tmp_path)


def test_experts_of_the_list_stay_as_they_are(tmp_path: Path) -> None:
    make_checkpoint("gpt-oss", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = "model.layers.1.mlp.experts.down_proj"
    for name in list(tensors):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and name != plain:
            blocks, scales = encode(tensors.pop(name).transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    spared = PUBLISHED | {"modules_to_not_convert": ["model.layers.1.*.experts.down_proj"]}
    edit_json(tmp_path / "config.json", quantization_config=spared)
    model = build(tmp_path)
    assert plain not in quantized_layers(model) and len(quantized_layers(model)) == 5
    parameter = model.get_submodule(plain).weight
    assert torch.equal(parameter, tensors[plain].transpose(1, 2).reshape(-1, INNER))


def test_a_missing_odd_or_impossible_tensor_is_named(checkpoint: Any, tmp_path: Path) -> None:
    tensors = load_file(checkpoint[0] / "model.safetensors")
    broken = tensors[SCALES].clone()
    broken[3, 5, 1] = 255
    for name, tensor, reason in (
        (BLOCKS, None, "missing"),
        (SCALES, None, "missing"),
        (BLOCKS, tensors[BLOCKS][:, :, :-1].contiguous(), "shape"),
        (BLOCKS, tensors[BLOCKS][:-1].contiguous(), "missing"),
        (SCALES, tensors[SCALES].float(), "float32"),
        (SCALES, torch.ones(3, dtype=torch.uint8), "shape"),
        (SCALES.replace("_scales", ""), broken, "255"),
    ):
        changes = {SCALES if reason == "255" else name: tensor}
        with pytest.raises(LoadError, match=re.escape(name.removesuffix("_blocks"))) as caught:
            build(changed(checkpoint, tmp_path, **changes))
        assert reason in str(caught.value) and name in str(caught.value)
        assert str(caught.value).count(name) == 1, "once, not for each expert"


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    edit_json(make_checkpoint("llama", tmp_path) / "config.json", quantization_config=PUBLISHED)
    with pytest.raises(ConfigError, match="takes none of this model's layers"):
        build(tmp_path)


def test_dummy_weights_can_be_made(checkpoint: Any) -> None:
    layers = quantized_layers(build(checkpoint[0], load_format="dummy")).values()
    assert layers
    for layer in layers:
        weights = dequantize(layer.expert_weight, torch.float32)
        assert weights.isfinite().all() and 0.001 < weights.std() < 1.0


def test_ranks_have_whole_groups(checkpoint: Any) -> None:
    """Of three groups of inner features, one rank has two."""
    folder, _ = checkpoint
    check_ranks(folder, "GptOssForCausalLM", 2, load_plugins(), 2e-4)
    check_moves(folder, 2, quantization="mxfp4")

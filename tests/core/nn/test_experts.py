"""Mixtures of experts: routing, the reference's sums, names of weights, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from jackfield.core.config import EngineConfig
from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.loading.build import build_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.loading.quantize import quantized_layers
from jackfield.core.nn.activations import ClampedSwiGLU
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.experts import SparseMLP
from jackfield.core.nn.layer_operations.experts import ExpertWeight
from jackfield.core.nn.norm import RMSNorm
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.quantized_weight import (
    QuantizedWeight,
    dequantize,
    round_to_fp8,
    round_to_words,
)
from jackfield.core.nn.routing import Routing, RoutingRule
from jackfield.core.registry import load_plugins
from jackfield.plugins.models.gpt_oss import GptOssForCausalLM
from jackfield.plugins.models.mixtral import MixtralForCausalLM
from jackfield.plugins.models.qwen3_moe import Qwen3MoeForCausalLM

from helpers import edit_json, make_checkpoint

OPERATIONS = Operations()
NAMES = {
    Qwen3MoeForCausalLM: {
        "experts.{}.gate_proj.weight": ("experts.gate_up_proj.weight", "{}.gate"),
        "experts.{}.up_proj.weight": ("experts.gate_up_proj.weight", "{}.up"),
        "experts.{}.down_proj.weight": ("experts.down_proj.weight", "{}"),
        "gate.weight": ("gate.weight", None),
        "up_proj.weight": ("gate_up_proj.weight", "up"),
    },
    MixtralForCausalLM: {
        "experts.{}.w1.weight": ("experts.gate_up_proj.weight", "{}.gate"),
        "experts.{}.w3.weight": ("experts.gate_up_proj.weight", "{}.up"),
        "experts.{}.w2.weight": ("experts.down_proj.weight", "{}"),
        "gate.weight": ("gate.weight", None),
    },
}


@pytest.mark.parametrize("model", NAMES, ids=lambda model: model.__name__)
def test_names_of_weights_go_both_ways(model: Any) -> None:
    block = {MixtralForCausalLM: "block_sparse_moe"}.get(model, "mlp")
    for stored, (parameter, shard) in NAMES[model].items():
        for expert in (0, 3, 127):
            name = f"model.layers.5.{block}.{stored.format(expert)}"
            target = f"model.layers.5.mlp.{parameter}", shard and shard.format(expert)
            assert model.weight_map.target(name) == target
            assert model.weight_map.source(*target) == name


def test_a_tensor_of_all_experts_comes_apart_into_their_shards() -> None:
    """Gates and ups take turns, and weights (not what is packed) are stored the other way round."""
    weights = GptOssForCausalLM.weight_map
    block = "model.layers.5.mlp.experts"
    stacked = torch.arange(2 * 3 * 8).view(2, 3, 8)
    for stored, parameter, rows in (
        ("gate_up_proj", "gate_up_proj.weight", stacked.transpose(1, 2)),
        ("gate_up_proj_blocks", "gate_up_proj.blocks", stacked),
        ("gate_up_proj_bias", "gate_up_proj.bias", stacked[:, 0]),
    ):
        tensor = stacked[:, 0] if stored.endswith("bias") else stacked
        pieces = list(weights.pieces(f"{block}.{stored}", tensor))
        names = {(name, shard) for name, shard, _ in pieces}
        shards = ("0.gate", "0.up", "1.gate", "1.up")
        assert names == {(f"{block}.{parameter}", shard) for shard in shards}
        for (_, shard, piece), (expert, first) in zip(
            pieces, ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True
        ):
            assert shard == f"{expert}.{'up' if first else 'gate'}"
            assert torch.equal(piece, rows[expert, first::2])
        assert all(weights.source(*name) == f"{block}.{stored}" for name in names)
    assert weights.source(f"{block}.down_proj", "1") == f"{block}.down_proj"
    router = ("model.layers.5.mlp.gate.bias", None)
    assert weights.target("model.layers.5.mlp.router.bias") == router
    assert weights.source(*router) == "model.layers.5.mlp.router.bias"


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.data())
def test_routing_is_a_softmax_and_the_largest_of_it(tokens: int, count: int, data: Any) -> None:
    top_k = data.draw(st.integers(1, count))
    renormalize = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randint(-3, 4, (tokens, count), generator=generator).float()
    weights, experts, _ = OPERATIONS.route(logits, RoutingRule(top_k, renormalize=renormalize))
    assert weights.shape == experts.shape == (tokens, top_k)
    assert weights.dtype == torch.float32 and experts.dtype == torch.int32
    for row, expert_ids, actual in zip(logits, experts.tolist(), weights, strict=True):
        order = sorted(range(count), key=lambda e: (-float(row[e]), e))
        assert expert_ids == order[:top_k], "of equal ones the lower number"
        expected = torch.softmax(row, -1)[expert_ids]
        expected = expected / expected.sum() if renormalize else expected
        torch.testing.assert_close(actual, expected)


def by_hand(
    x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """gate_up: [experts, 2 * inner, hidden]; down: [experts, hidden, inner]."""
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(routing.weights[token], routing.experts[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += weight * (down[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [1, 11])
def test_the_reference_sums_what_each_expert_says(packed: bool, tokens: int) -> None:
    torch.manual_seed(2)
    experts, hidden, inner, top_k = 5, 16, 24, 3
    x, residual = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
    routing = OPERATIONS.route(torch.randn(tokens, experts), RoutingRule(top_k, renormalize=False))
    weights: list[Any] = [
        torch.randn(experts * 2 * inner, hidden),
        torch.randn(experts * hidden, inner),
    ]
    if packed:
        rounded = [round_to_fp8(weight) for weight in weights]
        weights = [
            QuantizedWeight(values, scale[None], values.shape[1]) for values, scale in rounded
        ]
    dense = [dequantize(weight, x.dtype) if packed else weight for weight in weights]
    actual = OPERATIONS.experts(x, routing, *weights, residual=residual.clone())
    expected = residual + by_hand(
        x, routing, dense[0].view(experts, -1, hidden), dense[1].view(experts, hidden, inner)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 11])
def test_the_reference_adds_biases_and_clamps(tokens: int) -> None:
    torch.manual_seed(3)
    count, hidden, inner = 5, 16, 24
    gate_up, down = torch.randn(count, 2 * inner, hidden), torch.randn(count, hidden, inner)
    gate_up_bias, down_bias = torch.randn(count, 2 * inner), torch.randn(count, hidden)
    x = torch.randn(tokens, hidden)
    routing = OPERATIONS.route(torch.randn(tokens, count), RoutingRule(3, renormalize=True))
    expected = x.clone()
    for token in range(tokens):
        for weight, e in zip(routing.weights[token], routing.experts[token], strict=True):
            both = gate_up[e] @ x[token] + gate_up_bias[e]
            gate = torch.minimum(both[:inner], torch.tensor(2.0))
            up = torch.maximum(torch.minimum(both[inner:], torch.tensor(2.0)), torch.tensor(-2.0))
            made = (up + 1) * gate / (1 + torch.exp(-1.5 * gate))
            expected[token] += weight * (down[e] @ made + down_bias[e])
    actual = OPERATIONS.experts(
        x, routing, gate_up.flatten(0, 1), down.flatten(0, 1), residual=x.clone(),
        gate_up_bias=gate_up_bias.flatten(), down_bias=down_bias.flatten(),
        activation=ClampedSwiGLU(alpha=1.5, limit=2.0),
    )  # fmt: skip
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_experts_without_gates_square_what_is_positive() -> None:
    tokens, num_experts, top_k, hidden, inner = 5, 4, 2, 6, 8
    x = torch.randn(tokens, hidden)
    up, down = torch.randn(num_experts, inner, hidden), torch.randn(num_experts, hidden, inner)
    routing = OPERATIONS.route(torch.randn(tokens, num_experts), RoutingRule(top_k))
    expected = x.clone()
    for token in range(tokens):
        for weight, e in zip(routing.weights[token], routing.experts[token], strict=True):
            made = up[e] @ x[token]
            expected[token] += weight * (down[e] @ torch.where(made > 0, made * made, 0.0))
    actual = OPERATIONS.experts(
        x, routing, up.flatten(0, 1), down.flatten(0, 1), residual=x.clone(), activation="relu2"
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


class OlderOperations(Operations):
    """From when experts had neither biases nor another activation."""

    name = "older"

    def experts(
        self, x: torch.Tensor, routing: Routing, gate_up: ExpertWeight, down: ExpertWeight,
        *, residual: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        return super().experts(x, routing, gate_up, down, residual=residual)


def test_older_operations_serve_mixtures_that_need_no_more(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True
    )

    def build_layer() -> Any:
        resolved = resolve_model_config(config)
        return build_model(load_plugins(), config, resolved, torch.device("cpu"), OlderOperations())

    make_checkpoint("mixtral", tmp_path)
    layer = build_layer().model.layers[0]
    x = torch.randn(4, 64)
    assert layer.mlp(x.clone(), layer.post_attention_layernorm).isfinite().all()
    make_checkpoint("gpt-oss", tmp_path)
    with pytest.raises(ConfigError, match=r"'older' .* experts.activation, experts.bias") as actual:
        build_layer()
    assert actual.value.param == "operations"


def build(folder: Path, **options: Any) -> Any:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, **options
    )
    device, plugins = torch.device("cpu"), load_plugins()
    return build_model(plugins, config, resolve_model_config(config, plugins), device, OPERATIONS)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_experts_per_tok": 8}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"num_local_experts": 10**6}, "num_experts"),
        ({"num_local_experts": -1}, "num_experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"hidden_act": "relu"}, "hidden_act"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_by_the_fields_name(
    changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    edit_json(make_checkpoint("qwen3-moe", tmp_path) / "config.json", **changes)
    with pytest.raises(ConfigError, match=field):
        build(tmp_path)


@pytest.mark.parametrize("quantization", [None, "rtn"])
def test_an_experts_missing_or_odd_tensor_is_named(
    quantization: str | None, tmp_path: Path
) -> None:
    tensors = load_file(make_checkpoint("mixtral", tmp_path) / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    stranger = name.replace("experts.2", "experts.9")
    for changed in (
        {key: tensor for key, tensor in tensors.items() if key != name},
        {**tensors, name: tensors[name][:-1].contiguous()},
        {**tensors, stranger: tensors[name].clone()},
    ):
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        named = stranger if stranger in changed else name
        with pytest.raises(LoadError, match=re.escape(named)):
            build(tmp_path, quantization=quantization)


@pytest.mark.parametrize("value", [0, -1.0, True, "7", float("nan")])
def test_an_odd_limit_of_activations_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    edit_json(make_checkpoint("gpt-oss", tmp_path) / "config.json", swiglu_limit=value)
    with pytest.raises(ConfigError, match="swiglu_limit"):
        build(tmp_path)


def test_experts_in_one_tensor_can_be_rounded_at_load(tmp_path: Path) -> None:
    tensors = load_file(make_checkpoint("gpt-oss", tmp_path) / "model.safetensors")
    model = build(tmp_path, quantization="rtn")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    layer = quantized_layers(model)[name]
    plain = tensors[name].transpose(1, 2)
    rows = torch.cat([plain[:, 0::2], plain[:, 1::2]], dim=1).flatten(0, 1)
    words, scale = round_to_words(rows, 8, 64)
    expected = dequantize(QuantizedWeight(words, scale, 64), torch.float32)
    assert torch.equal(dequantize(layer.expert_weight, torch.float32), expected)
    bias = tensors[f"{name}_bias"]
    assert torch.equal(layer.bias, torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1).flatten())


def test_experts_of_a_list_of_layers_to_leave_alone(tmp_path: Path) -> None:
    """All experts of a layer, or none of them."""
    folder = make_checkpoint("qwen3-moe", tmp_path)
    spared = "model.layers.0.mlp.experts"
    rtn = {"quant_method": "rtn", "bits": 8, "modules_to_not_convert": [spared]}
    edit_json(folder / "config.json", quantization_config=rtn)
    layers = dict(build(folder).named_modules())
    assert isinstance(layers[f"{spared}.gate_up_proj"].expert_weight, torch.Tensor)
    assert isinstance(
        layers["model.layers.2.mlp.experts.gate_up_proj"].expert_weight, QuantizedWeight
    )
    rtn["modules_to_not_convert"] = [f"{spared}.3.down_proj"]
    edit_json(folder / "config.json", quantization_config=rtn)
    with pytest.raises(ConfigError, match=r"experts\.3\.down_proj but not .* and 2 more") as caught:
        build(folder)
    assert caught.value.param == "quantization_config.modules_to_not_convert"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_routing_by_sigmoids_of_groups_is_what_it_says(data: Any) -> None:
    groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    top_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, top_groups * size))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    logits = torch.randn(3, groups * size, generator=generator)
    bias = torch.randn(groups * size, generator=generator)
    rule = RoutingRule(top_k, "sigmoid", True, bias, groups, top_groups, factor=2.5)
    weights, experts, _ = OPERATIONS.route(logits, rule)
    for row, actual, expert_ids in zip(
        logits.tolist(), weights.tolist(), experts.tolist(), strict=True
    ):
        scores = [1 / (1 + math.exp(-logit)) for logit in row]
        biased = [score + float(more) for score, more in zip(scores, bias, strict=True)]
        members = [range(first, first + size) for first in range(0, len(row), size)]
        best = sorted(
            members, key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2])
        )
        within = [expert for group in best[:top_groups] for expert in group]
        assert expert_ids == sorted(within, key=lambda e: -biased[e])[:top_k]
        total = sum(scores[e] for e in expert_ids)
        assert actual == pytest.approx([2.5 * scores[e] / total for e in expert_ids], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"groups": 4}, "n_group"),
        ({"groups": 0}, "n_group"),
        ({"groups": 3, "top_groups": 4}, "topk_group"),
        ({"groups": 3, "top_groups": 1, "top_k": 3}, "num_experts_per_tok"),
    ],
)
def test_groups_that_cannot_be_are_refused_by_name(changes: dict[str, int], field: str) -> None:
    context = BuildContext(torch.device("cpu"), torch.float32, OPERATIONS)
    rule = RoutingRule(2)._replace(**changes)
    with pytest.raises(ConfigError) as caught:
        SparseMLP(6, rule, 8, 8, "silu", context)
    assert caught.value.param == field


def test_an_override_has_no_options_that_it_does_not_state() -> None:
    class Routes(Operations):
        name = "routes"

        def route(self, logits: torch.Tensor, rule: RoutingRule) -> Routing:
            return super().route(logits, rule)

    class States(Routes):
        features = Operations.features

    assert Routes.features == {
        name for name in Operations.features if not name.startswith("route.")
    }
    assert {"experts.bias", "experts.activation"} <= Routes.features
    assert Operations.features == States.features
    context = BuildContext(torch.device("cpu"), torch.float32, Routes())
    with pytest.raises(ConfigError, match=r"'routes' .* route.bias, route.sigmoid"):
        SparseMLP(6, RoutingRule(2, "sigmoid"), 8, 8, "silu", context, score_bias=True)


class NotedNorms(Operations):
    """Operations that count the norms that they make together with a product."""

    name = "noted norms"
    features = Operations.features
    count = 0

    def normed_linear(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.count += 1
        return super().normed_linear(*args)


class OwnRule(SparseMLP):
    def route(self, logits: torch.Tensor) -> Routing:
        return super().route(-logits)


class OwnRouter(SparseMLP):
    def choose(self, x: torch.Tensor) -> Routing:
        return super().choose(x.abs())


@pytest.mark.parametrize("kind", [SparseMLP, OwnRule, OwnRouter])
def test_a_norm_and_the_routers_product_are_one_operation(kind: type[SparseMLP]) -> None:
    """A family whose router reads something else has the norm before it."""
    torch.manual_seed(2)
    operations = NotedNorms()
    build = BuildContext(torch.device("cpu"), torch.float32, operations)
    mixture = kind(6, RoutingRule(2, renormalize=True), 16, 8, "silu", build)
    norm = RMSNorm(16, 1e-6, build)
    for parameter in (*mixture.parameters(), *norm.parameters()):
        parameter.data.normal_()
    hidden = torch.randn(5, 16)
    got = mixture(hidden.clone(), norm)
    assert operations.count == (kind is not OwnRouter)
    torch.testing.assert_close(got, hidden + mixture(norm(hidden), None, add=False))

"""Families with LayerNorm, written with the blocks alone, say what `transformers` says.

Cohere: no biases of norms, attention and MLP side by side over one norm, pairs of neighbours turned
(rows of queries and keys put in order on loading), scaled logits. GPT-NeoX: biases everywhere, side
by side over two norms or one after the other, an MLP without a gate, queries, keys and values of a
head together. StarCoder2: one after the other, biases, no gate, a sliding window.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from jackfield import AsyncEngine, EngineConfig, SamplingParams, hookimpl
from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.loading.model_config import ModelConfig
from jackfield.core.loading.weight_map import RowOrder, WeightMap
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.embedding import Embedding
from jackfield.core.nn.linear import GatedLinear, Linear
from jackfield.core.nn.mlp import PlainMLP
from jackfield.core.nn.norm import BiaslessLayerNorm, LayerNorm, RMSNorm, norm_eps
from jackfield.core.nn.operations import Operations
from jackfield.core.registry import load_plugins
from jackfield.plugins.models.decoder import (
    QKV_SHARDS,
    Block,
    CausalLM,
    Decoder,
    HeadlessLM,
    ParallelBlock,
    SelfAttention,
)

from helpers import COMMON, VOCAB

# ---------------------------------------------------------------- Cohere


class CohereBlock(ParallelBlock):
    norm = BiaslessLayerNorm


class CohereDecoder(Decoder):
    block = CohereBlock


class CohereForCausalLM(CausalLM):
    decoder = CohereDecoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.scale: float = config.hf_config.logit_scale
        order = RowOrder.halves(config.head_dim)
        self.weight_map = replace(HeadlessLM.weight_map, rows={"q_proj": order, "k_proj": order})

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) * self.scale


# ---------------------------------------------------------------- GPT-NeoX


class NeoxAttention(SelfAttention):
    def projection(self, hf: Any, sizes: dict[str, int], build: BuildContext) -> Linear:
        return Linear(hf.hidden_size, sum(sizes.values()), build, bias=hf.attention_bias)


class NeoxSerialBlock(Block):
    norm = LayerNorm


class NeoxParallelBlock(ParallelBlock):
    norm = LayerNorm
    norms = NeoxSerialBlock.norms


class NeoxDecoder(Decoder):
    @classmethod
    def block_of(cls, config: ModelConfig) -> type[Block]:
        parallel = config.hf_config.use_parallel_residual
        return NeoxParallelBlock if parallel else NeoxSerialBlock


class NeoxForCausalLM(CausalLM):
    attention = NeoxAttention
    decoder = NeoxDecoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        order = RowOrder.by_part(config.num_heads, 3, config.head_dim)
        self.weight_map = WeightMap(
            prefixes={"gpt_neox.": "model.", "embed_out.": "lm_head."},
            parts={
                "embed_in": "embed_tokens",
                "final_layer_norm": "norm",
                "attention.query_key_value": "self_attn.qkv_proj",
                "attention.dense": "self_attn.o_proj",
                "dense_h_to_4h": "up_proj",
                "dense_4h_to_h": "down_proj",
            },
            rows={"qkv_proj": order},
        )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        return PlainMLP(hf.hidden_size, hf.intermediate_size, hf.hidden_act, build)


# ---------------------------------------------------------------- StarCoder2


class StarcoderAttention(SelfAttention):
    @staticmethod
    def qkv_bias(hf: Any) -> bool:
        return bool(hf.use_bias)

    output_bias = qkv_bias

    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        window: int | None = hf.sliding_window
        return window


class StarcoderBlock(Block):
    norm = LayerNorm


class StarcoderDecoder(Decoder):
    block = StarcoderBlock


class StarcoderForCausalLM(CausalLM):
    attention = StarcoderAttention
    decoder = StarcoderDecoder
    weight_map = WeightMap(
        stacked=QKV_SHARDS,
        tied=HeadlessLM.weight_map.tied,
        parts={"c_fc": "up_proj", "c_proj": "down_proj"},
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        return PlainMLP(hf.hidden_size, hf.intermediate_size, hf.hidden_act, build,
                        bias=hf.use_bias)  # fmt: skip


# ---------------------------------------------------------------- all of them


class Plugin:
    @hookimpl
    def register_models(self, registry: Any) -> None:
        registry.add("CohereForCausalLM", CohereForCausalLM)
        registry.add("GPTNeoXForCausalLM", NeoxForCausalLM)
        registry.add("Starcoder2ForCausalLM", StarcoderForCausalLM)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "neox": ("GPTNeoX", {"use_parallel_residual": True, "hidden_act": "gelu"}),
    "neox-serial": ("GPTNeoX", {"use_parallel_residual": False, "hidden_act": "gelu_new",
                                "attention_bias": False}),
    "starcoder2": ("Starcoder2", {"sliding_window": 24, "use_bias": True}),
}  # fmt: skip


def checkpoint(family: str, folder: Path) -> tuple[Path, Any]:
    """A random one whose norms and biases count, and the model of `transformers`."""
    name, changes = FAMILIES[family]
    fields = {**COMMON, **changes}
    if name == "GPTNeoX":
        del fields["num_key_value_heads"]
    config = getattr(transformers, f"{name}Config")(**fields)
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    model.save_pretrained(folder)
    return folder, model.eval()


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_layer_norm_family_made_of_blocks_equals_transformers(
    family: str, tmp_path: Path, device: str
) -> None:
    folder, reference = checkpoint(family, tmp_path)
    config = EngineConfig(
        model=str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=160,
        max_num_seqs=4, max_num_batched_tokens=32, num_gpu_blocks_override=64, device=device,
    )  # fmt: skip
    prompts = [[3 + (7 * i * n) % (VOCAB - 3) for i in range(1, n)] for n in (3, 20, 71)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    async with AsyncEngine(config, plugins=load_plugins(extra=[Plugin()])) as engine:
        for prompt in prompts:
            *_, last = [output async for output in engine.generate(prompt, params)]
            completion = last.outputs[0]
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt + completion.token_ids[:-1]])).logits[0]
            wanted = logits[len(prompt) - 1 :].float().log_softmax(-1)
            assert completion.token_ids == wanted.argmax(-1).tolist()
            assert completion.logprobs is not None
            for row, told in zip(wanted, completion.logprobs, strict=True):
                for token, logprob in told.items():
                    assert logprob.logprob == pytest.approx(float(row[token]), abs=2e-3)


def test_halves_turns_pairs_into_halves() -> None:
    order = RowOrder.halves(6, 4)
    rows = torch.arange(12.0).reshape(12, 1)
    assert order.apply("a.weight", rows).flatten().tolist() == [
        0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11,
    ]  # fmt: skip


def test_by_part_takes_heads_apart() -> None:
    rows = torch.arange(12.0)  # 2 heads of 3 parts of 2 rows
    moved = RowOrder.by_part(2, 3, 2).apply("a.bias", rows)
    assert moved.tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


def test_one_order_after_another() -> None:
    rows = torch.randn(24, 2)
    first, second = RowOrder.by_part(2, 3, 4), RowOrder.halves(4)
    both = first.then(second)
    once = second.apply("a.weight", first.apply("a.weight", rows))
    assert torch.equal(both.apply("a.weight", rows), once)
    with pytest.raises(ValueError, match="do not fit together"):
        RowOrder((0, 1, 2)).then(RowOrder((1, 0)))


@pytest.mark.parametrize("order", [(), (0, 0), (1, 2)])
def test_an_order_has_each_row_once(order: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="each of which comes once"):
        RowOrder(order)


def test_what_cannot_be_put_in_order_is_refused_by_name() -> None:
    order = RowOrder.halves(4)
    scale = torch.ones(1)
    assert order.apply("a.q_proj.input_scale", scale) is scale
    with pytest.raises(LoadError, match=r"'a.qweight' is of a layer whose rows are put in another"):
        order.apply("a.qweight", torch.zeros(8, 8))
    with pytest.raises(LoadError, match=r"'a.weight' has 6 rows, no multiple of 4"):
        order.apply("a.weight", torch.zeros(6, 8))


def test_a_configuration_without_an_eps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no eps for LayerNorm \(layer_norm_eps or "):
        norm_eps(object(), LayerNorm)
    both = type("Both", (), {"rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-5})
    assert (norm_eps(both, LayerNorm), norm_eps(both, RMSNorm)) == (1e-5, 1e-6)


@pytest.mark.parametrize("norm", [LayerNorm, BiaslessLayerNorm, RMSNorm])
def test_products_take_any_norm(norm: Any) -> None:
    build = BuildContext(torch.device("cpu"), torch.float32, Operations())
    made = norm(8, 1e-5, build)
    x, residual = torch.randn(3, 8), torch.randn(3, 4)
    linear = Linear(8, 4, build)
    gated = GatedLinear(8, 4, build)
    head = Embedding(9, 8, build)
    for parameter in [*made.parameters(), *linear.parameters(), *gated.parameters(),
                      *head.parameters()]:  # fmt: skip
        nn.init.uniform_(parameter)
    with torch.inference_mode():
        normed = made(x)
        assert torch.equal(linear(x, norm=made, residual=residual.clone()),
                           linear(normed, residual=residual.clone()))  # fmt: skip
        assert torch.equal(gated(x, norm=made), gated(normed))
        assert torch.equal(head.logits(x, norm=made), head.logits(normed))
        assert torch.equal(made.add(x, x.clone()), x + normed)

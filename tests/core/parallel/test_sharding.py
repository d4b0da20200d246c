"""What each rank holds, and how what ranks compute is added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.core.errors import ConfigError, LoadError
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.embedding import Embedding
from jackfield.core.nn.linear import Linear, MergedLinear
from jackfield.core.nn.operations import Operations
from jackfield.core.parallel.ranks import ONE_RANK, Ranks
from jackfield.core.parallel.sharding import HeadShare, Sharding, even_slice
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.divided_models import check_ranks
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.conformance.rank_threads import run_ranks, thread_ranks

from helpers import edit_json, make_checkpoint


def context(ranks: Ranks = ONE_RANK) -> BuildContext:
    return BuildContext(torch.device("cpu"), torch.float32, Operations(), ranks=ranks)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "queries", "keys"),
    [
        (8, 8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (8, 2, 2, [(0, 4), (4, 8)], [(0, 1), (1, 2)]),
        (8, 2, 4, [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (6, 1, 3, [(0, 2), (2, 4), (4, 6)], [(0, 1)] * 3),
        (5, 5, 1, [(0, 5)], [(0, 5)]),
    ],
)
def test_heads_go_to_the_rank_of_their_key(
    heads: int, kv_heads: int, size: int, queries: Any, keys: Any
) -> None:
    shares = [HeadShare.of(heads, kv_heads, ranks.tensor) for ranks in thread_ranks(size)]
    assert [(share.queries.start, share.queries.stop) for share in shares] == queries
    assert [(share.keys.start, share.keys.stop) for share in shares] == keys


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 6, 4), (12, 3, 2), (12, 2, 3)])
def test_heads_that_ranks_cannot_share_are_refused(heads: int, kv_heads: int, size: int) -> None:
    with pytest.raises(ConfigError, match="heads") as caught:
        HeadShare.of(heads, kv_heads, thread_ranks(size)[0].tensor)
    assert caught.value.param == "tensor_parallel_size"


def test_a_refusal_names_a_number_of_ranks_that_can() -> None:
    with pytest.raises(ConfigError, match=r"96 features .* by 5; 4 can"):
        even_slice(96, thread_ranks(5)[0].tensor)


def test_one_tensor_of_several_layers_is_divided_in_each() -> None:
    held = {"q": slice(4, 8), "k": slice(2, 4)}
    ranks = thread_ranks(2)[1]
    sizes = {"q": 8, "k": 4}
    layer = MergedLinear(3, sizes, context(ranks), shard="out", shares=held, whole=True)
    tensor = torch.arange(36.0).view(12, 3)
    got = layer.shardings["weight"].part(None, tensor)
    assert layer.shards == {} and layer.weight.shape == got.shape
    assert torch.equal(got, torch.cat([tensor[4:8], tensor[10:12]]))


@pytest.mark.parametrize("shape", [(11, 3), (13, 3), (), (3,)])
def test_a_tensor_of_another_size_is_refused(shape: tuple[int, ...]) -> None:
    """Also a longer one, which has all that the rank would take."""
    sharding = Sharding(0, {"": 12}, {"": (slice(0, 6),)})
    with pytest.raises(LoadError, match="ranks divide 12"):
        sharding.part(None, torch.zeros(shape))


def test_products_are_summed_once_with_one_bias_and_one_residual() -> None:
    x, residual = torch.randn(3, 8), torch.randn(3, 6)
    weight, bias = torch.randn(6, 8), torch.randn(6)
    ranks = thread_ranks(2)
    layers = [Linear(8, 6, context(rank), bias=True, shard="in") for rank in ranks]
    for layer in layers:
        layer.requires_grad_(False)
        for name, tensor in (("weight", weight), ("bias", bias)):
            sharding = layer.shardings.get(name)
            part = sharding.part(None, tensor) if sharding else tensor
            getattr(layer, name).copy_(part)
    halves = x.chunk(2, dim=1)
    results = run_ranks([
        lambda rank=rank, layer=layer, half=half: rank.add(residual.clone(), (layer, half))
        for rank, layer, half in zip(ranks, layers, halves, strict=True)
    ])  # fmt: skip
    want = residual + x @ weight.t() + bias
    for got in results:
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("vocab", [7, 8, 9])
def test_a_vocabulary_that_does_not_divide_is_padded(vocab: int) -> None:
    """With four ranks the last one may have no token at all."""
    table, hidden = torch.randn(vocab, 5), torch.randn(2, 5)
    ranks = thread_ranks(4)
    layers = [Embedding(vocab, 5, context(rank), shard="vocabulary") for rank in ranks]
    for layer in layers:
        layer.requires_grad_(False)
        layer.weight.copy_(layer.shardings["weight"].part(None, table))
    tokens = torch.arange(vocab)
    for got in run_ranks([lambda layer=layer: layer(tokens) for layer in layers]):
        assert torch.equal(got, table)
    for got in run_ranks([lambda layer=layer: layer.logits(hidden) for layer in layers]):
        torch.testing.assert_close(got, hidden @ table.t())


class CountedOperations(Operations):
    """Counts products, and those that add a residual."""

    def __init__(self) -> None:
        self.products = self.added = 0

    def linear(self, x: Any, weight: Any, bias: Any = None, **more: Any) -> torch.Tensor:
        self.products += 1
        self.added += more.get("residual") is not None
        return super().linear(x, weight, bias, **more)


def test_one_rank_adds_residuals_in_its_products(tmp_path: Path) -> None:
    model = PagedModel(make_checkpoint("llama", tmp_path), "float32", kernels="torch")
    operations = CountedOperations()
    for module in model.model.modules():
        if hasattr(module, "operations"):
            module.operations = operations
    model.run({0: [5, 6, 7]})
    layers = len(model.model.model.layers)
    assert (operations.products, operations.added) == (4 * layers + 1, 2 * layers)


def test_quantized_layers_are_divided_with_their_biases(tmp_path: Path) -> None:
    """Ranks divide between groups, so that rounding is the same."""
    folder = make_checkpoint("llama", tmp_path)
    rounded = {"quant_method": "rtn", "bits": 8, "group_size": 8}
    edit_json(folder / "config.json", quantization_config=rounded)
    check_ranks(folder, "LlamaForCausalLM", 2, load_plugins(), 2e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_quantized_heads_and_embeddings_are_whole_on_each_rank(tied: bool, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2" if tied else "llama", tmp_path)
    rounded = {"quant_method": "rtn", "bits": 8, "group_size": 8, "lm_head": True}
    edit_json(folder / "config.json", quantization_config={**rounded, "embeddings": tied})
    name = "Qwen2ForCausalLM" if tied else "LlamaForCausalLM"
    check_ranks(folder, name, 2, load_plugins(), 2e-4)


def test_a_scale_of_a_block_goes_with_its_features() -> None:
    """Of 300 features in blocks of 128, the last block is smaller."""
    halves = Sharding(1, {"": 300}, {"": (slice(0, 256), slice(256, 300))})
    scales = halves.over(0, 128)
    assert scales.sizes == {"": 3} and scales.slices == {"": (slice(0, 2), slice(2, 3))}
    with pytest.raises(ConfigError, match="stores 96 together"):
        halves.over(0, 96)
    with pytest.raises(ConfigError, match="mixes"):
        halves.over(0, 0)

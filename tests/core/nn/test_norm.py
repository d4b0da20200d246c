"""Norms before products, and their eps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from jackfield.core.errors import ConfigError
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.embedding import Embedding
from jackfield.core.nn.linear import GatedLinear, Linear
from jackfield.core.nn.norm import BiaslessLayerNorm, LayerNorm, RMSNorm, norm_eps
from jackfield.core.nn.operations import Operations


def test_a_configuration_without_an_eps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no eps for LayerNorm \(layer_norm_eps or "):
        norm_eps(object(), LayerNorm)
    both = type("Both", (), {"rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-5})
    assert (norm_eps(both, LayerNorm), norm_eps(both, RMSNorm)) == (1e-5, 1e-6)


@pytest.mark.parametrize("norm", [LayerNorm, BiaslessLayerNorm, RMSNorm])
def test_products_take_any_norm(norm: Any) -> None:
    build = BuildContext(torch.device("cpu"), torch.float32, Operations())
    layer_norm = norm(8, 1e-5, build)
    x, residual = torch.randn(3, 8), torch.randn(3, 4)
    linear = Linear(8, 4, build)
    gated = GatedLinear(8, 4, build)
    head = Embedding(9, 8, build)
    for parameter in [*layer_norm.parameters(), *linear.parameters(), *gated.parameters(),
                      *head.parameters()]:  # fmt: skip
        nn.init.uniform_(parameter)
    with torch.inference_mode():
        normed = layer_norm(x)
        assert torch.equal(linear(x, norm=layer_norm, residual=residual.clone()),
                           linear(normed, residual=residual.clone()))  # fmt: skip
        assert torch.equal(gated(x, norm=layer_norm), gated(normed))
        assert torch.equal(head.logits(x, norm=layer_norm), head.logits(normed))
        assert torch.equal(layer_norm.add(x, x.clone()), x + normed)


class Noting(Operations):
    """Notes the norms that products get."""

    features = Operations.features | {"linear.norm_sums"}

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Any] = []

    def normed(self, x: torch.Tensor, norm: Any) -> torch.Tensor:
        self.norms.append(norm)
        return super().normed(x, norm)


@pytest.mark.parametrize("own_bias", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_sums_its_weight_for_the_norm_before_it(bias: bool, own_bias: bool) -> None:
    operations = Noting()
    build = BuildContext(torch.device("cpu"), torch.float32, operations)
    norm, other = (LayerNorm(8, 1e-5, build, bias=bias) for _ in range(2))
    linear = Linear(8, 5, build, bias=own_bias)
    for parameter in (*norm.parameters(), *other.parameters(), *linear.parameters()):
        nn.init.uniform_(parameter)
    x = torch.randn(1, 8)
    with torch.inference_mode():
        linear.expect(norm)
        linear.expect(RMSNorm(8, 1e-5, build))
        linear.expect(None)
        product = linear(x, norm=norm)
        linear(x, norm=other)
    known, unknown = operations.norms
    assert unknown.sums is None, "another norm's sums are not known"
    wide = x.double()
    deviation = (wide.var(correction=0) + 1e-5).sqrt()
    scaled = (wide * norm.weight.double()) @ linear.weight.double().t()
    expected = (scaled - wide.mean() * known.sums.factors) / deviation
    assert (known.sums.offsets is not None) == (bias or own_bias)
    if bias or own_bias:
        expected = expected + known.sums.offsets
    torch.testing.assert_close(product.double(), expected, atol=1e-5, rtol=1e-5)


def test_products_sum_nothing_for_operations_without_the_feature() -> None:
    build = BuildContext(torch.device("cpu"), torch.float32, Operations())
    linear = Linear(8, 5, build)
    linear.expect(LayerNorm(8, 1e-5, build))
    assert not linear.norm_sums

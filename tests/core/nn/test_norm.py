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

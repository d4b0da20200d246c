"""Names of the last hook API still work, with a warning that has the new one."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from jackfield.core.nn.operations import Operations
from jackfield.core.nn.quantized_weight import QuantizedWeight, round_to_int8

OLD = {
    "jackfield.core.nn.packed.PackedWeight": "jackfield.core.nn.quantized_weight.QuantizedWeight",
    "jackfield.core.nn.quantized.PackedLinear": (
        "jackfield.core.nn.quantized.QuantizedWeightLinear"
    ),
}


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("old", OLD)
def test_an_old_name_is_the_new_one(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=OLD[old]) as caught:
        value = named(old)
    assert value is named(OLD[old])
    assert caught[0].filename == __file__, "the warning names who uses the old name"


def test_other_names_of_such_a_module_are_absent() -> None:
    with pytest.raises(ImportError, match="cannot import name 'PackedWeights'"):
        exec("from jackfield.core.nn.packed import PackedWeights")


def weight() -> QuantizedWeight:
    values, scale = round_to_int8(torch.eye(4))
    return QuantizedWeight(values, scale[None], 4)


def test_an_old_method_is_the_subclass_own() -> None:
    class Doubling(Operations):
        def quantized_linear(self, *args: Any, **more: Any) -> torch.Tensor:
            return 2 * super().quantized_linear(*args, **more)

    x = torch.ones(1, 4)
    with pytest.warns(DeprecationWarning, match="packed_linear is now quantized_linear"):
        product = Doubling().packed_linear(x, weight())
    assert torch.equal(product, 2 * x)


def test_an_override_by_the_old_name_serves_and_reaches_the_one_that_it_overrides() -> None:
    with pytest.warns(DeprecationWarning, match=r"Doubling\.packed_linear is now quantized_linear"):

        class Doubling(Operations):
            def packed_linear(self, *args: Any, **more: Any) -> torch.Tensor:
                return 2 * super().packed_linear(*args, **more)  # type: ignore[no-any-return]

    class Fourfold(Doubling):
        def quantized_linear(self, *args: Any, **more: Any) -> torch.Tensor:
            return 2 * super().quantized_linear(*args, **more)

    x = torch.ones(1, 4)
    with pytest.warns(DeprecationWarning):
        assert torch.equal(Doubling().quantized_linear(x, weight()), 2 * x)
        assert torch.equal(Fourfold().quantized_linear(x, weight()), 4 * x)

"""Names of the last hook API still work, with a warning that has the new one."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from jackfield.core.nn.operations import Operations
from jackfield.core.nn.quantized_weight import QuantizedWeight, round_to_int8
from jackfield.core.protocols.parsers import Content, Reasoning
from jackfield.plugins.conformance.parsers import ReasoningParserKit
from jackfield.plugins.parsing.tagged_reasoning import TaggedReasoningParser
from jackfield.plugins.parsing.tool_machine import Answer

OLD = {
    "jackfield.core.loading.weight_map.Together": (
        "jackfield.core.loading.weight_map.StackedExperts"
    ),
    "jackfield.core.nn.packed.PackedWeight": "jackfield.core.nn.quantized_weight.QuantizedWeight",
    "jackfield.core.nn.quantized.PackedLinear": (
        "jackfield.core.nn.quantized.QuantizedWeightLinear"
    ),
    "jackfield.plugins.parsing.json_calls.glance": (
        "jackfield.plugins.parsing.json_calls.peek_after_space"
    ),
    "jackfield.plugins.parsing.thought.ThoughtParser": (
        "jackfield.plugins.parsing.tagged_reasoning.TaggedReasoningParser"
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


def test_parsers_may_emit_by_the_old_names() -> None:
    with pytest.warns(DeprecationWarning, match="say is now emit"):

        class Shouting(TaggedReasoningParser):
            def say(self, text: str) -> None:
                super().say(text.upper())

    parser = Shouting(thinking=False)
    with pytest.warns(DeprecationWarning, match="say is now emit"):
        events = [*parser.feed("b"), *parser.finish()]
    assert events == [Content("B")]
    with pytest.warns(DeprecationWarning, match="think is now emit_reasoning"):
        parser.think("c")
    assert parser.events[-1] == Reasoning("c")
    with pytest.warns(DeprecationWarning, match="say is now emit"):
        Answer(events).say("c")
    assert events[-1] == Content("c")


def test_a_kit_takes_the_end_of_reasoning_by_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="thought_end is now reasoning_end"):

        class Bracketed(ReasoningParserKit):
            thought_end = "</think>"

    assert Bracketed.reasoning_end == "</think>"

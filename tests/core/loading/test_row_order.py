"""Orders of rows: what comes first, what cannot be put in order."""

from __future__ import annotations

import pytest
import torch

from jackfield.core.errors import LoadError
from jackfield.core.loading.weight_map import RowOrder


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

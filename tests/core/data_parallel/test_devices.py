"""Each member sees its own devices, in the order in which this process sees them."""

from __future__ import annotations

import pytest

from jackfield.core.data_parallel.devices import slices
from jackfield.core.errors import ConfigError


@pytest.mark.parametrize(
    ("size", "each", "count", "visible", "expected"),
    [
        (2, 1, 2, None, ["0", "1"]),
        (2, 2, 8, None, ["0,1", "2,3"]),
        (2, 1, 2, "5, 3", ["5", "3"]),
        (2, 2, 4, "GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
    ],
)
def test_devices_are_divided(
    size: int, each: int, count: int, visible: str | None, expected: list[str]
) -> None:
    environments = slices(size, each, count, visible)
    assert environments == [{"CUDA_VISIBLE_DEVICES": names} for names in expected]


def test_too_few_devices_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="2 members of 2 ranks need 4 GPUs, and torch finds 3"):
        slices(2, 2, 3, None)

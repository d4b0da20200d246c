"""Each member sees its own devices, in the order in which this process sees them."""

from __future__ import annotations

import pytest

from jackfield.core.config import EngineConfig
from jackfield.core.data_parallel.devices import member_environments, slices
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


def test_members_have_a_device_for_each_rank_of_each_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    environments = member_environments(EngineConfig(device="cuda", **sizes))
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["0,1,2,3", "4,5,6,7"]

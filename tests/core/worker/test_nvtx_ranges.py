"""NVTX ranges: one around each call of a module, nested as calls are; none stays open."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.worker.nvtx_ranges import mark_modules


class Ranges:
    def __init__(self) -> None:
        self.text = ""

    def push(self, name: str) -> int:
        self.text += f"{name}("
        return 7  # As NVTX gives a depth, which must not become a module's argument.

    def pop(self) -> int:
        self.text += ")"
        return 7


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


def test_ranges_are_named_after_modules_and_nested_as_their_calls() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU()))
    plain = model(x := torch.ones(1, 2))
    mark_modules(model, (ranges := Ranges()).push, ranges.pop)
    assert torch.equal(model(x), plain)
    assert ranges.text == "Sequential(0()1(1.0()))"


def test_a_call_that_fails_leaves_no_range_open() -> None:
    model = nn.Sequential(nn.Sequential(Failing()))
    mark_modules(model, (ranges := Ranges()).push, ranges.pop)
    with pytest.raises(ValueError, match="no"):
        model(torch.ones(1))
    assert ranges.text == "Sequential(0(0.0()))"


async def test_without_a_gpu_they_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"enable_layerwise_nvtx_tracing: .* NVIDIA GPU"):
        await AsyncEngine(EngineConfig(device="cpu", enable_layerwise_nvtx_tracing=True)).start()

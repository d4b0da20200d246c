"""The example that trains with the engine in the loop learns something."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import jackfield

EXAMPLE = Path(jackfield.__file__).resolve().parent / "examples/policy_gradient.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("policy_gradient", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
async def test_the_reward_rises_and_both_sides_agree() -> None:
    """An update that were lost, or came in part, would show in the difference at once."""
    steps = await example().train(6)
    assert steps[-1].reward > steps[0].reward + 0.08
    assert max(step.difference for step in steps) < 1e-4

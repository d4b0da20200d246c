"""The tests' interpreter (tests/interpreter.py); that it computes right is what the others show."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch

from jackfield.kernels import reference
from jackfield.kernels.rms_norm import rms_norm

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels run on a device", allow_module_level=True)
if not hasattr(pytest.importorskip("triton.runtime.interpreter"), "quickened"):
    pytest.skip("another version of Triton runs as it is", allow_module_level=True)


def test_a_launch_does_not_list_the_language_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 40), torch.randn(40)
    rms_norm(x, weight, 1e-6)
    listed: list[Any] = []
    monkeypatch.setattr(inspect, "getmembers", lambda *arguments: listed.append(arguments) or [])
    got = rms_norm(x, weight, 1e-6)
    assert not listed
    torch.testing.assert_close(got, reference.rms_norm(x, weight, 1e-6))

"""torch's attention is called where it cannot take a kernel that needs a plan for each shape."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import jackfield
from jackfield.core.nn.sdpa import sdpa

ROOT = Path(jackfield.__file__).resolve().parent
CALLERS = {"core/nn/sdpa.py"}
NAME = "scaled_dot_product_attention"


def test_torchs_attention_is_called_in_one_place() -> None:
    """Elsewhere each new shape would cost tenths of a second on a GPU."""
    callers = {
        path.relative_to(ROOT).as_posix()
        for folder in ("core", "plugins", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        if NAME in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == NAME
    }
    assert callers == CALLERS


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_it_is_torchs_attention(masked: bool, kv_heads: int, device: str) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 9, 16, device=device)
    key, value = torch.randn(2, 2, kv_heads, 11, 16, device=device)
    mask = torch.rand(9, 11, device=device) > 0.3 if masked else None
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.2, enable_gqa=True
    )
    got = sdpa(query, key, value, mask=mask, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)

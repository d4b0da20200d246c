"""The instructions that make floats of codes, for every word: the interpreter runs others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from jackfield.kernels.attention import decode_codes

WORDS = torch.arange(1 << 16)
LOW, HIGH = WORDS & 255, WORDS >> 8
SIGNED = [(each ^ 128) - 128 for each in (LOW, HIGH)]
NIBBLES = [LOW & 15, HIGH & 15, LOW >> 4, HIGH >> 4]
"""In the order of the parts."""
FLOATS: dict[str, torch.dtype] = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


def lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    """Each bit of the result is that of the table at the bits of a, b and c."""
    out = torch.zeros_like(a)
    for place in range(8):
        if table >> place & 1:
            pick = [each if place >> n & 1 else ~each for n, each in ((2, a), (1, b), (0, c))]
            out |= pick[0] & pick[1] & pick[2]
    return out & 0xFFFFFFFF


def halves(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """[n] of 32 bits → [2, n] float32"""
    parts = torch.stack((x & 0xFFFF, x >> 16))
    return parts.to(torch.uint16).view(kind).float()


def run(ptx: str, words: torch.Tensor, outputs: int) -> list[torch.Tensor]:
    """Return what the instructions write. words: [n], 32 bits each"""
    values = {f"${outputs}": words}

    def value(name: str) -> torch.Tensor:
        return values[name] if name in values else torch.full_like(words, int(name, 0))

    for line in ptx.strip("{ }").split(";"):
        name, _, rest = line.strip().partition(" ")
        target, *sources = [each.strip() for each in rest.split(",")]
        operation, _, kind = name.partition(".rn.")
        if name == "mov.b32":
            values[target] = value(sources[0])
        elif name == "shr.u32":
            values[target] = value(sources[0]) >> int(sources[1])
        elif name == "lop3.b32":
            values[target] = lop3(*map(value, sources[:3]), int(sources[3], 0))
        elif operation in ("fma", "sub"):
            x, y, *z = (halves(value(each), FLOATS[kind]) for each in sources)
            exact = x * y + z[0] if operation == "fma" else x - y
            bits = exact.to(FLOATS[kind]).view(torch.uint16).long()
            values[target] = bits[0] | bits[1] << 16
        else:
            assert name in (".reg", ""), name
    return [values[f"${place}"] for place in range(outputs)]


@pytest.mark.parametrize(
    ("name", "kind", "codes", "expected"),
    [
        ("_KEYS_OF_8", torch.float16, SIGNED, lambda code, upper: 1152 + code),
        ("_KEYS_OF_4", torch.float16, NIBBLES, lambda code, upper: 1024 + (code << 4 * upper)),
        ("_VALUES_OF_8", torch.bfloat16, SIGNED, lambda code, upper: code),
        ("_VALUES_OF_8_FLOAT16", torch.float16, SIGNED, lambda code, upper: code),
        ("_VALUES_OF_4", torch.bfloat16, NIBBLES, lambda code, upper: 128 + code),
        ("_VALUES_OF_4_FLOAT16", torch.float16, NIBBLES, lambda code, upper: 1024 + code),
    ],
)  # fmt: skip
def test_every_code_becomes_its_float(
    name: str,
    kind: torch.dtype,
    codes: list[torch.Tensor],
    expected: Callable[[torch.Tensor, bool], torch.Tensor],
) -> None:
    # Beside each word another one: neither changes the other.
    outputs = run(getattr(decode_codes, name).value, WORDS | WORDS.flip(0) << 16, len(codes))
    for part, (output, code) in enumerate(zip(outputs, codes, strict=True)):
        both = halves(output, kind)
        wanted = expected(code, part > 1).float()
        assert torch.equal(both[0], wanted) and torch.equal(both[1], wanted.flip(0))

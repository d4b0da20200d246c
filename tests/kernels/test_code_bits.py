"""The instructions that make floats of codes, for every code: the interpreter runs others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from jackfield.core.nn.quantized_weight import E2M1, pack_e2m1
from jackfield.kernels.attention import decode_codes, quantized_tiles
from jackfield.kernels.quant import e2m1

ALL = torch.arange(1 << 16)
LOW, HIGH = ALL & 255, ALL >> 8
SIGNED = [(each ^ 128) - 128 for each in (LOW, HIGH)]
FLOATS: dict[str, torch.dtype] = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}
HALF, BFLOAT = FLOATS.values()
SCALE, ZERO = 0x3F003F00, 0x3F803F80
"""Pairs of 0.5 and 1.0 in bfloat16: no number with these is rounded."""


def lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    """Each bit of the result is that of the table at the bits of a, b and c."""
    out = torch.zeros_like(a)
    for place in range(8):
        if table >> place & 1:
            picked = [each if place >> n & 1 else ~each for n, each in ((2, a), (1, b), (0, c))]
            out |= picked[0] & picked[1] & picked[2]
    return out & 0xFFFFFFFF


def prmt(a: torch.Tensor, b: torch.Tensor, places: int) -> torch.Tensor:
    """Each byte of the result is one of those of a and b."""
    both = a | b << 32
    return sum((both >> 8 * (places >> 4 * n & 7) & 255) << 8 * n for n in range(4))


def halves(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """[n] of 32 bits → [2, n] float32"""
    return torch.stack((x & 0xFFFF, x >> 16)).to(torch.uint16).view(kind).float()


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "lop3.b32": lambda a, b, c, table: lop3(a, b, c, int(table[0])),
    "prmt.b32": lambda a, b, places: prmt(a, b, int(places[0])),
    "fma": lambda x, y, z: x * y + z,
    "sub": lambda x, y: x - y,
}


def run(ptx: str, outputs: int, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return what the instructions write. inputs: [n], 32 bits each"""
    values = {f"${outputs + place}": each for place, each in enumerate(inputs)}
    for line in ptx.strip("{ }").split(";"):
        name, _, rest = line.strip().partition(" ")
        if name in (".reg", ""):
            continue
        target, *sources = [each.strip() for each in rest.split(",")]
        operands = [
            values[each] if each in values else torch.full_like(inputs[0], int(each, 0))
            for each in sources
        ]
        operation, _, kind = name.partition(".rn.")
        if kind:
            exact = OPERATIONS[operation](*(halves(each, FLOATS[kind]) for each in operands))
            bits = exact.to(FLOATS[kind]).view(torch.uint16).long()
            values[target] = bits[0] | bits[1] << 16
        else:
            values[target] = OPERATIONS[name](*operands)
    return [values[f"${place}"] for place in range(outputs)]


@pytest.mark.parametrize(
    ("name", "kind", "bits", "expected"),
    [
        ("_KEYS_OF_8", HALF, 8, lambda code, upper: 1152 + code),
        ("_KEYS_OF_4", HALF, 4, lambda code, upper: 1024 + (code << 4 * upper)),
        ("_VALUES_OF_8", BFLOAT, 8, lambda code, upper: code),
        ("_VALUES_OF_8_FLOAT16", HALF, 8, lambda code, upper: code),
        ("_VALUES_OF_4", BFLOAT, 4, lambda code, upper: 128 + code),
        ("_VALUES_OF_4_FLOAT16", HALF, 4, lambda code, upper: 1024 + code),
    ],
)
def test_decode_kernels_read_words(
    name: str,
    kind: torch.dtype,
    bits: int,
    expected: Callable[[torch.Tensor, bool], torch.Tensor],
) -> None:
    codes = SIGNED if bits == 8 else [LOW & 15, HIGH & 15, LOW >> 4, HIGH >> 4]
    # Beside each word another one: neither changes the other.
    outputs = run(getattr(decode_codes, name).value, len(codes), ALL | ALL.flip(0) << 16)
    for part, (output, code) in enumerate(zip(outputs, codes, strict=True)):
        wanted = expected(code, part > 1).float()
        assert torch.equal(halves(output, kind), torch.stack((wanted, wanted.flip(0))))


@pytest.mark.parametrize(
    ("name", "kind", "bits", "scale", "zero"),
    [
        ("_DEQUANTIZE_8", BFLOAT, 8, 0.5, 1.0),
        ("_DEQUANTIZE_4", BFLOAT, 4, 0.5, 1.0 - 0.5 * 7.5),
        ("_WIDEN_FLOAT16", HALF, 8, 1.0, 0.0),
        ("_UNPACK_FLOAT16", HALF, 4, 1.0, 1024.0),
    ],
)
def test_the_prompt_kernel_reads_bytes(
    name: str, kind: torch.dtype, bits: int, scale: float, zero: float
) -> None:
    words = [torch.full_like(ALL, word) for word in (SCALE, SCALE, ZERO, ZERO)]
    outputs = run(
        getattr(quantized_tiles, name).value, 2 if bits == 8 else 4, ALL | ALL.flip(0) << 16,
        *(words if name.startswith("_DEQ") else ()),
    )  # fmt: skip
    parts = [SIGNED] if bits == 8 else [(LOW & 15, HIGH & 15), (LOW >> 4, HIGH >> 4)]
    for part, (low, high) in enumerate(parts):
        wanted = zero + scale * torch.stack((low, high)).float()
        assert torch.equal(halves(outputs[2 * part], kind), wanted)
        assert torch.equal(halves(outputs[2 * part + 1], kind), wanted.flip(1))


@pytest.mark.parametrize(("kind", "unit"), [("bf16x2", 2.0**126), ("f16x2", 2.0**14)])
@pytest.mark.parametrize("half", [0, 1])
def test_products_read_floats_of_4_bits(kind: str, unit: float, half: int) -> None:
    """All values of half a word, of four numbers each, beside others."""
    codes = torch.stack([ALL >> 4 * part & 15 for part in range(4)], dim=1)
    packed = pack_e2m1(torch.cat([codes.flip(0), codes] if half else [codes, codes.flip(0)], 1), 1)
    words = packed[:, 0].long() & 0xFFFFFFFF
    pairs = run(e2m1._HALVES.value, 2, words, words.flip(0))
    instructions = e2m1._BFLOAT16 if kind == "bf16x2" else e2m1._FLOAT16
    numbers = torch.tensor(E2M1)
    for part, code in enumerate(codes.unbind(1)):
        (output,) = run(instructions[part].value, 1, pairs[half])
        wanted = numbers[torch.stack((code, code.flip(0)))]
        actual = halves(output, FLOATS[kind]) * unit
        assert torch.equal(actual, wanted) and torch.equal(actual.signbit(), wanted.signbit())

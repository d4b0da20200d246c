"""Keys and values as small integers: what is stored, how far it is from the numbers, and where."""

from __future__ import annotations

import pytest
import torch

from jackfield.core.cache.formats import QUANTIZED_FORMATS
from jackfield.core.cache.groups import TokenCache
from jackfield.core.nn.kv_cache.quantized_cache import (
    KVCache,
    QuantizedCache,
    dequantize,
    quantize,
    read_keys,
    read_values,
    token_parts,
    write_blocks,
    write_values,
)
from jackfield.core.worker.kv_cache.memory import bytes_per_token

BITS = (8, 4)
ULP = 2.0**-7
"""Largest relative distance of a number to the next bfloat16 that is not below it, and twice that
to the nearest."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [16, 80, 128])
@pytest.mark.parametrize("bits", BITS)
def test_no_number_is_further_away_than_half_a_step(bits: int, dim: int) -> None:
    """By the range of each head, whatever its size and middle."""
    size = 10.0 ** torch.arange(-6, 5)[:, None, None]
    offset = torch.tensor([0.0, 1.0, -30.0])[None, :, None]
    x = (random(11, 3, dim) + offset) * size
    restored = dequantize(*quantize(x, bits))
    low, high = x.amin(-1), x.amax(-1)
    reach = (high - low) / 2 + (high + low).abs() / 2 * ULP / 2
    step = reach / (127 if bits == 8 else 7.5) * (1 + ULP)
    assert ((restored - x).abs().amax(-1) <= step / 2 * 1.001).all()
    assert ((restored - x).abs().amax(-1) > step / 8).all(), "it has few codes"


@pytest.mark.parametrize("bits", BITS)
def test_heads_without_a_range(bits: int) -> None:
    """Zeros are exact, other constants are rounded to bfloat16; tiny ranges do not overflow."""
    x = torch.stack([torch.full((16,), value) for value in (0.0, -3.0, 1e30, 1.0 + 2**-12, 1e-38)])
    restored = dequantize(*quantize(x, bits))
    assert restored[0].tolist() == [0.0] * 16 and restored[1].tolist() == [-3.0] * 16
    torch.testing.assert_close(restored, x, rtol=ULP, atol=0.0)
    tiny = random(1, 16) * 1e-36
    assert (dequantize(*quantize(tiny, bits)) - tiny).abs().max() <= 4e-36


def test_an_outlier_spoils_its_own_head_and_token_alone() -> None:
    x = random(3, 2, 32)
    before = dequantize(*quantize(x, 8))
    x[1, 0, 5] = 1e4
    after = dequantize(*quantize(x, 8))
    same = torch.ones(3, 2, dtype=torch.bool)
    same[1, 0] = False
    assert torch.equal(after[same], before[same])
    assert abs(float(after[1, 0, 5]) - 1e4) < 40


def test_half_a_head_shares_bytes_with_the_other() -> None:
    """0 .. 7 and 15 .. 8: steps of one, from a middle of 7.5."""
    x = torch.cat([torch.arange(8.0), torch.arange(15.0, 7.0, -1.0)])
    codes, word = quantize(x, 4)
    assert codes.tolist() == [low | (15 - low) << 4 for low in range(8)]
    assert word.item() == 0x40F03F80, "7.5 above 1.0"
    assert torch.equal(dequantize(codes, word), x)


def test_words_and_codes_of_8_bits() -> None:
    codes, word = quantize(torch.tensor([-125.0, 1.0, 2.0, 129.0]), 8)
    assert codes.tolist() == [-127, -1, 0, 127] and word.item() == 0x40003F80


def empty_cache(name: str, dim: int = 16, blocks: int = 5, size: int = 4) -> QuantizedCache:
    parts = {
        part.name: torch.zeros(
            part.count, blocks, size, *part.shape, dtype=getattr(torch, part.dtype)
        )
        for part in QUANTIZED_FORMATS[name].parts(2, dim)
    }
    return QuantizedCache.of(parts)


@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_what_is_written_is_read_and_nothing_else_changes(name: str) -> None:
    cache = empty_cache(name)
    for part in cache:
        part.copy_(torch.randint(0, 100, part.shape))
    before = [part.clone() for part in token_parts(cache).values()]
    key, value = random(2, 6, 2, 16)
    slots = torch.tensor([5, 6, 19, 0, 12, 3])
    write_blocks(key, value, cache, slots)
    blocks = torch.tensor([4, 1, 3, 0])
    form = QUANTIZED_FORMATS[name]
    read = [part(cache, blocks, torch.float32, 1.0) for part in (read_keys, read_values)]
    for part, x, bits in zip(read, (key, value), (form.key_bits, form.value_bits), strict=True):
        places = [(block == slots // 4).nonzero() for block in blocks]
        for row, found in enumerate(places):
            for token in found.flatten().tolist():
                assert torch.equal(
                    part[row, int(slots[token]) % 4], dequantize(*quantize(x[token], bits))
                )
    others = torch.tensor([slot for slot in range(20) if slot not in slots.tolist()])
    for part, old in zip(token_parts(cache).values(), before, strict=True):
        after, same = (each[:, others // 4, others % 4] for each in (part, old))
        assert torch.equal(after, same)


@pytest.mark.parametrize("name", [*QUANTIZED_FORMATS, "float16", "float8_e4m3fn"])
def test_values_are_replaced_alone(name: str) -> None:
    if name in QUANTIZED_FORMATS:
        cache: KVCache = empty_cache(name)
    else:
        cache = torch.zeros(2, 5, 4, 2, 16).to(getattr(torch, name))
    value = random(3, 2, 16).round()
    write_values(value, cache, torch.tensor([7, 2, 9]), 0.5)
    assert not read_keys(cache, torch.arange(5), torch.float32, 1.0).any()
    values = read_values(cache, torch.arange(5), torch.float32, 0.5)
    expected = torch.zeros(20, 2, 16)
    expected[[7, 2, 9]] = value
    bound = {"int4": 0.3, "int8_int4": 0.3, "int8": 0.02}.get(name, 0.0)
    torch.testing.assert_close(values.flatten(0, 1).float(), expected, atol=bound, rtol=0.0)


@pytest.mark.parametrize(("name", "expected"), [("int8", 264), ("int8_int4", 200), ("int4", 136)])
def test_bytes_of_a_token(name: str, expected: int) -> None:
    """Keys and values of one head of 128 channels, with their scales and zeros."""
    assert bytes_per_token(TokenCache(QUANTIZED_FORMATS[name].parts(1, 128))) == expected

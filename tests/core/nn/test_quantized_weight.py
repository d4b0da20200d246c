"""Words of 4-bit floats: where each number is."""

from __future__ import annotations

import pytest
import torch

from jackfield.core.nn.quantized_weight import E2M1_SIGNS, e2m1_run, pack_e2m1, unpack_e2m1


@pytest.mark.parametrize(
    ("size", "group", "run"),
    [
        (2880, 32, 32), (1440, 32, 16), (256, 32, 32), (64, 32, 32), (32, 32, 32), (144, 16, 16),
        (96, 32, None), (100, 16, None), (64, 8, None),
    ],
)  # fmt: skip
def test_each_part_of_a_run_is_in_one_group(size: int, group: int, run: int | None) -> None:
    assert e2m1_run(size, group) == run
    if run is None:
        return
    columns = torch.arange(size)
    codes = (torch.arange(3)[:, None] * 7 + columns) % 16
    words = pack_e2m1(codes, run)
    assert words.shape == (3, size // 8) and words.dtype == torch.int32
    assert torch.equal(unpack_e2m1(words, run), codes.int())
    for first in range(0, size // 8, run):
        count = min(run, size // 8 - first)
        for part in range(8):
            begin = 8 * first + part * count
            assert begin // group == (begin + count - 1) // group
            for place in (0, count - 1):
                bits = words[:, first + place].long() >> (16 * (part // 4)) & 0xFFFF
                number = bits >> (3 * (part % 4)) & 7
                number += 8 * (bits >> E2M1_SIGNS[part % 4] & 1)
                assert torch.equal(number, codes[:, begin + place])

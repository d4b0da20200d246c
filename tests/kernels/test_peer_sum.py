"""Sums over ranks by each other's memory: processes of Triton's interpreter over shared files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

PROGRAM = Path(__file__).resolve().parent / "programs" / "peer_sum_rank.py"
MAILBOX_BYTES = 1 << 17
SECONDS = 120.0


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_get_the_same_bits_of_the_right_sum(size: int, tmp_path: Path) -> None:
    """Each way after each other one, of few values and of more than fit into one round."""
    files = [tmp_path / str(number) for number in range(size + 1)]
    for file in files:
        file.write_bytes(bytes(MAILBOX_BYTES))
    ranks = [
        forked.Popen(
            [sys.executable, str(PROGRAM), str(rank), *map(str, files)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, outputs
    first, *others = [lines for lines, _ in outputs]
    assert len(first.splitlines()) == 10
    assert all(lines == first for lines in others)

"""Ranks with a GPU each, in processes of their own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).resolve().parent / "programs" / "nccl_rank.py"
SECONDS = 240.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_sums_are_alike_and_can_be_recorded() -> None:
    """Every rank has the same bits of each sum; a graph with sums is replayed among others."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    size = 2
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(size), str(port)],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size
    first, *others = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert all(other == first for other in others)
    assert first.pop("smallest") == 10
    flat = [
        part for value in first.values() for part in (value if isinstance(value, list) else [value])
    ]
    assert all(part is not False for part in flat), first

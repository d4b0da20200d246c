"""One rank's sums in Triton's interpreter: `python peer_sum_rank.py RANK FILE...`.

FILE...: each rank's mailbox, and last an array where ranks meet. Prints the
bits of each sum, a line each.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

from jackfield.kernels import peer_sum as module

SECONDS = 60.0
CALLS = (
    ("words", 6), ("one_shot", 10), ("words", 512), ("two_shot", 1030), ("one_shot", 300),
    ("words", 2), ("two_shot", 64), ("one_shot", 700), ("two_shot", 129), ("words", 1000),
)  # fmt: skip
"""Ways, and values of a term."""

module.WORD_PROGRAMS, module.WORD_TILE = 4, 256
module.TILE_PROGRAMS, module.TILE, module.SMALLEST_TILE = 3, 64, 16

rank, files = int(sys.argv[1]), sys.argv[2:]
*arrays, meeting = [np.memmap(file, np.uint8, "r+") for file in files]
size = len(arrays)
addresses = [array.ctypes.data for array in arrays]
boxes = module.Mailboxes.at(rank, addresses, torch.device("cpu"))
# A rank that begins alone would hold a core while the others still import.
meeting[rank] = 1
end = time.monotonic() + SECONDS
while not meeting[:size].all():
    assert time.monotonic() < end, "the other ranks have not started"
    time.sleep(0.01)
for number, (way, count) in enumerate(CALLS):
    draw = torch.Generator().manual_seed(number)
    dtype = (torch.float32, torch.float16)[number % 2]
    terms = torch.randn(size, count, generator=draw).to(dtype)
    residual = torch.randn(count, generator=draw).to(dtype) if number % 3 else None
    exact = terms.double().sum(0)
    if residual is not None:
        exact += residual.double()
    got = module.peer_sum(terms[rank].clone(), residual, boxes, way)  # type: ignore[arg-type]
    torch.testing.assert_close(got, exact.to(dtype), atol=0.004, rtol=0.002)
    print(way, count, got.view(torch.uint8).sum(dtype=torch.int64).item(), flush=True)

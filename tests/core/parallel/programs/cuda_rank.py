"""One rank with a GPU: `python cuda_rank.py RANK SIZE PORT COLLECTIVES`. Prints a line of JSON."""

from __future__ import annotations

import json
import sys

import torch

from jackfield.core.config import EngineConfig
from jackfield.core.parallel.join import join, leave, rank_device
from jackfield.core.registry import load_plugins
from jackfield.core.worker.graphs.recorder import CudaRecorder

rank, size, port = map(int, sys.argv[1:4])
config = EngineConfig(
    device="cuda", tensor_parallel_size=size, distributed_timeout_seconds=60,
    collectives=sys.argv[4],
)  # fmt: skip
ranks = join(config, load_plugins(), rank=rank, address=("127.0.0.1", port))
device = rank_device(config, rank)
torch.cuda.set_device(device)
group = ranks.tensor
result: dict[str, object] = {}

terms = torch.stack([
    torch.randn(64, 4096, generator=torch.Generator().manual_seed(each)) for each in range(size)
])  # fmt: skip
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    total = group.all_reduce(terms[rank].to(device, dtype, copy=True))
    bits = total.view(torch.uint8).sum(dtype=torch.int64)
    wanted = terms.to(dtype).float().sum(0).to(device)
    near = torch.allclose(total.float(), wanted, atol=0.1)
    result[str(dtype)] = [int(bits), hash(total.float().sum().item()), near]
    joined = group.all_gather(terms[rank].to(device, dtype))
    result[f"joined {dtype}"] = torch.equal(joined, torch.cat(list(terms), -1).to(device, dtype))

# Terms of every size, one after another, so that those of few programs follow those of many.
draw = torch.Generator().manual_seed(size)
for number in range(120):
    count = int(torch.randint(1, 1 << (8 + number % 14), (1,), generator=draw)) * 2
    parts = torch.randn(size, count, generator=draw).to(device, torch.bfloat16)
    residual = torch.randn(count, generator=draw).to(device, torch.bfloat16)
    wanted = (parts.float().sum(0) + residual.float()).bfloat16()
    total = group.all_reduce(parts[rank].clone(), residual)
    near = torch.allclose(total.float(), wanted.float(), atol=0.06, rtol=0.02)
    result[f"residual {number}"] = [near, int(total.view(torch.int16).sum(dtype=torch.int64))]

recorder = CudaRecorder(device, ranks)
x = torch.zeros(8, 256, device=device, dtype=torch.bfloat16)
weight = torch.eye(256, device=device, dtype=torch.bfloat16)
out = torch.empty(8, 256 * size, device=device, dtype=torch.bfloat16)


def step() -> None:
    y = x
    for _ in range(4):
        y = group.all_reduce(y @ weight) / size
    out.copy_(group.all_gather(y))


step()
replay = recorder(step)
right = True
for number in range(100):
    x.fill_(float(number % 17))
    replay()
    if number % 3 == 0:
        # Launched steps come between, on the same connections.
        group.all_reduce(torch.ones(1, device=device))
    right = right and bool((out == float(number % 17)).all())
result["replays"] = right
result["smallest"] = ranks.minimum(10 + rank, device)
del replay, recorder, step
torch.cuda.synchronize()
leave(ranks)
print(json.dumps(result))

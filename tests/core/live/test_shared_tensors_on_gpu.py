"""Weights that a trainer on the same GPU, or on another one, hands over."""

from __future__ import annotations

import asyncio
import socket
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.live.engine_jobs import JoinGroup, LeaveGroup, OpenTensors
from jackfield.core.live.torch_pickles import read_sglang_tensors, read_vllm_handles
from jackfield.core.live.worker_jobs import TensorPart

from helpers import changed_checkpoint, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TRAINER = """
import base64, pickle, sys
import torch
from multiprocessing.reduction import ForkingPickler
from safetensors.torch import load_file
from torch.multiprocessing.reductions import reduce_tensor

tensors = load_file(sys.argv[1], device="cuda:0")
uuid = str(torch.cuda.get_device_properties(0).uuid)
flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors.values()])
torch.cuda.synchronize()
for content in (
    [{uuid: reduce_tensor(t)[1]} for t in tensors.values()], {uuid: reduce_tensor(flat)[1]},
):
    print(base64.b64encode(pickle.dumps(content)).decode(), flush=True)
print(base64.b64encode(bytes(ForkingPickler.dumps(list(tensors.items())))).decode(), flush=True)
sys.stdin.read()
"""
SENDER = """
import sys
import torch
from jackfield.core.parallel.broadcast import BroadcastGroup
from safetensors.torch import load_file

device = torch.device("cuda", 1)
torch.cuda.set_device(device)
group = BroadcastGroup("127.0.0.1", int(sys.argv[2]), 0, 2, device, rendezvous="vllm", packed_bytes=9999)
group.send(load_file(sys.argv[1]).items())
sys.stdin.read()
"""  # noqa: E501


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    old = make_checkpoint("llama", tmp_path / "old")
    return old, changed_checkpoint(old, tmp_path / "new")


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device="cuda", dtype="float32", skip_tokenizer_init=True,
        max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=400,
    )  # fmt: skip


async def said(engine: AsyncEngine) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    async for output in engine.generate(list(range(3, 30)), params):
        last = output
    return list(last.outputs[0].token_ids)


async def start(program: str, *args: object) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *map(str, args), stdin=pipe, stdout=pipe, limit=1 << 24
    )


def parts_of(folder: Path) -> tuple[TensorPart, ...]:
    tensors = load_file(folder / "model.safetensors")
    return tuple(TensorPart(name, "float32", tuple(t.shape)) for name, t in tensors.items())


async def test_handles_of_a_trainer_are_opened(folders: tuple[Path, Path]) -> None:
    old, new = folders
    async with AsyncEngine(config_of(new)) as fresh:
        want = await said(fresh)
    trainer = await start(TRAINER, new / "model.safetensors")
    assert trainer.stdout is not None
    lines = [(await trainer.stdout.readline()).decode().strip() for _ in range(3)]
    assert all(b64decode(line) for line in lines)
    parts = parts_of(new)
    sizes = [t.nbytes for t in load_file(new / "model.safetensors").values()]
    async with AsyncEngine(config_of(old)) as engine:
        first = await said(engine)
        assert first != want
        for buckets in (
            read_vllm_handles(lines[0], parts, None),
            read_vllm_handles(lines[1], parts, sizes),
            read_sglang_tensors([lines[2]], flattened=False),
        ):
            async with await engine.begin_weight_update() as update:
                await engine.ask_live(OpenTensors(update=update.name, buckets=buckets))
                await update.commit()
            assert await said(engine) == want
            await engine.update_weights(old)
            assert await said(engine) == first
    await trainer.communicate(b"")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
async def test_a_group_of_vllm_is_joined(folders: tuple[Path, Path]) -> None:
    old, new = folders
    async with AsyncEngine(config_of(new)) as fresh:
        want = await said(fresh)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sender = await start(SENDER, new / "model.safetensors", port)
    options: dict[str, Any] = {"rendezvous": "vllm", "packed_bytes": 9999, "world_size": 2}
    async with AsyncEngine(config_of(old)) as engine:
        await engine.ask_live(JoinGroup(host="127.0.0.1", port=port, **options))
        async with await engine.begin_weight_update() as update:
            await update.receive(parts_of(new))
            await update.commit()
        assert await said(engine) == want
        await engine.ask_live(LeaveGroup())
    await sender.communicate(b"")

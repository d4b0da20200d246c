"""The executor `ray` on GPUs: two of one node, and one of each of two nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams

from helpers import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ray = pytest.importorskip("ray", reason="needs the package ray, which the extra `test` has")
cluster_utils = pytest.importorskip("ray.cluster_utils")

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


@pytest.fixture(params=[1, 2], ids=["one node", "two nodes"])
def num_nodes(request: pytest.FixtureRequest) -> Iterator[int]:
    """A node for each GPU, or one for both. The second node's processes see the second GPU alone,
    as if it were another host's."""
    number: int = request.param
    cluster = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={**NODE, "num_gpus": 3 - number, "include_dashboard": False},
    )
    if number == 2:
        cluster.add_node(**NODE, num_gpus=1, env_vars={"CUDA_VISIBLE_DEVICES": "1"})
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, configure_logging=False)
    yield number
    ray.shutdown()
    cluster.shutdown()


async def tokens(checkpoint: Path, **options: Any) -> tuple[list[list[int]], Any]:
    config = EngineConfig(
        model=str(checkpoint), device="cuda", dtype="float32", skip_tokenizer_init=True,
        max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=60, **options,
    )  # fmt: skip

    async def generate(length: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        prompt = [5 + (i * i) % 150 for i in range(length)]
        final = [output async for output in engine.generate(prompt, params)][-1]
        return final.outputs[0].token_ids

    async with AsyncEngine(config) as engine:
        found = await asyncio.gather(*map(generate, (3, 17, 40)))
        return found, engine.core.executor  # type: ignore[attr-defined]


def test_ranks_on_gpus_give_the_tokens_of_one(num_nodes: int, tmp_path: Path) -> None:
    """And NCCL adds what ranks of several hosts have, whatever each of them would choose."""
    checkpoint = make_checkpoint("qwen3", tmp_path)
    expected, _ = asyncio.run(tokens(checkpoint, executor="inprocess"))
    found, executor = asyncio.run(tokens(checkpoint, executor="ray", tensor_parallel_size=2))
    assert found == expected
    assert executor.config.collectives == ("auto" if num_nodes == 1 else "nccl")
    assert [follower.local_rank for follower in executor.followers] == [2 - num_nodes]

"""The executor `ray`, on a cluster of two nodes that are processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import transformers

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, EngineStopped, RankFailed
from jackfield.plugins.conformance.executors import ExecutorKit
from jackfield.plugins.executors.ray import cluster as cluster_module
from jackfield.plugins.executors.ray.actor import device_number
from jackfield.plugins.executors.ray.cluster import Placement
from jackfield.plugins.executors.ray.executor import RayExecutor

from helpers import COMMON, make_checkpoint

ray = pytest.importorskip("ray", reason="needs the package ray, which the extra `test` has")
cluster_utils = pytest.importorskip("ray.cluster_utils")

PROMPT = [5 + (i * i) % 150 for i in range(40)]
DETECTED = 60.0
"""Seconds after which an engine that has not ended counts as hanging, on a busy machine too."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    """Two nodes with two CPUs each, as Ray counts."""
    node = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 << 20}
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={**node, "include_dashboard": False}
    )
    cluster.add_node(**node)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two ranks of an engine are on one node."""
    groups = importlib.import_module("ray.util.placement_group")
    create = groups.placement_group

    def apart(bundles: Any, strategy: str, bundle_label_selector: Any) -> Any:
        free = [bundle_label_selector[0]] + [{}] * (len(bundles) - 1)
        return create(bundles, strategy="STRICT_SPREAD", bundle_label_selector=free)

    monkeypatch.setattr(groups, "placement_group", apart)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No actor lives, no placement group holds a place, and all CPUs are free again."""
    yield
    from ray.util.placement_group import placement_group_table

    end = time.monotonic() + DETECTED
    while ray.available_resources().get("CPU", 0) < ray.cluster_resources()["CPU"]:
        assert time.monotonic() < end, placement_group_table()
        time.sleep(0.05)
    states = {group["state"] for group in placement_group_table().values()}
    assert states <= {"REMOVED"}


def config(checkpoint: Path, **options: Any) -> EngineConfig:
    settings = {
        "model": str(checkpoint), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "block_size": 4, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 8,
        "num_gpu_blocks_override": 60, "executor": "ray", "tensor_parallel_size": 2, **options,
    }  # fmt: skip
    return EngineConfig(**settings)


async def tokens(engine: AsyncEngine, prompt: list[int], **params: Any) -> list[int]:
    settings = SamplingParams(max_tokens=12, ignore_eos=True, **params)
    return [output async for output in engine.generate(prompt, settings)][-1].outputs[0].token_ids


async def mixed(made: EngineConfig) -> list[list[int]]:
    async with AsyncEngine(made) as engine:
        if made.executor == "ray":
            executor: Any = engine.core.executor  # type: ignore[attr-defined]
            assert isinstance(executor, RayExecutor)
            nodes = {node.id for node in executor._placement.nodes}
            assert len(nodes) == made.tensor_parallel_size == len(executor.followers) + 1
        return await asyncio.gather(
            tokens(engine, PROMPT, temperature=0.0),
            tokens(engine, PROMPT[:30], temperature=0.9, seed=7, top_p=0.9),
            tokens(engine, PROMPT[3:9], temperature=0.0, repetition_penalty=1.3),
        )


@pytest.mark.usefixtures("spread")
def test_ranks_of_two_nodes_give_the_tokens_of_one_rank(checkpoint: Path) -> None:
    expected = asyncio.run(mixed(config(checkpoint, executor="inprocess", tensor_parallel_size=1)))
    assert asyncio.run(mixed(config(checkpoint))) == expected


@pytest.mark.usefixtures("spread")
def test_an_actor_that_is_killed_ends_the_engine(checkpoint: Path) -> None:
    """With its number, its host, and what Ray knows of its end."""

    async def lose() -> str:
        async with AsyncEngine(config(checkpoint)) as engine:
            executor: Any = engine.core.executor  # type: ignore[attr-defined]
            params = SamplingParams(max_tokens=60, ignore_eos=True)
            async for _ in engine.generate(PROMPT, params):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(executor.followers[0].process, signal.SIGKILL)
            with pytest.raises(EngineStopped):
                await engine.check_health()
            return engine.dead_reason or ""

    reason = asyncio.run(asyncio.wait_for(lose(), DETECTED))
    host = ray.nodes()[0]["NodeManagerHostname"]
    assert f"rank 1 of 2 on {host} (" in reason
    assert "its worker process has died" in reason


def test_an_actor_that_cannot_start_is_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own error is raised, not that the others wait for it."""

    async def start() -> None:
        engine = AsyncEngine(config(checkpoint))
        monkeypatch.setattr(RayExecutor, "_connect_all", kill_first)
        with pytest.raises(RankFailed, match=r"rank 1 of 2 on .* is gone"):
            await engine.start()
        await engine.stop()

    connect_all = RayExecutor._connect_all

    async def kill_first(self: RayExecutor, remotes: Any, *args: Any) -> None:
        ray.kill(remotes[0].actor)
        await connect_all(self, remotes, *args)

    asyncio.run(asyncio.wait_for(start(), DETECTED))


def test_ranks_are_on_one_host_where_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one only, the other is on another host; with none, it says who has what."""
    own = ray.get_runtime_context().get_node_id()

    async def place(*sizes: int) -> list[list[str]]:
        placements = [Placement("CPU", size) for size in sizes]
        try:
            for placement in placements:
                full = placement is placements[-1] and len(placements) == 3
                await placement.reserve(2 if full else DETECTED)
            return [[node.id for node in placement.nodes] for placement in placements]
        finally:
            for placement in placements:
                placement.release()

    assert asyncio.run(place(2)) == [[own, own]]
    monkeypatch.setattr(cluster_module, "TOGETHER_SECONDS", 1.0)
    [_, [first, second]] = asyncio.run(place(1, 2))
    assert first == own != second
    with pytest.raises(RankFailed, match=r"1 ranks wait .* has 2, .* has 2; 1 of them are free"):
        asyncio.run(place(1, 2, 1))


def test_rank_0_needs_a_gpu_of_its_host() -> None:
    with pytest.raises(ConfigError, match="Ray has no GPU on its host") as refusal:
        asyncio.run(Placement("GPU", 2).reserve(1))
    assert refusal.value.param == "executor"


@pytest.mark.parametrize(
    ("gpu", "visible", "number"),
    [("3", None, 3), ("3", "1,3", 1), ("GPU-b", "GPU-a, GPU-b", 1), ("0", "1,3", None)],
)
def test_the_number_of_a_gpu_is_its_place_among_those_visible(
    gpu: str, visible: str | None, number: int | None
) -> None:
    if number is None:
        with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=1,3") as refusal:
            device_number(gpu, visible)
        assert refusal.value.param == "executor"
    else:
        assert device_number(gpu, visible) == number


class TestRay(ExecutorKit):
    name = "ray"


@pytest.mark.slow
@pytest.mark.usefixtures("spread")
class TestTwoNodes(ExecutorKit):
    """Much of it is above, and faster."""

    name = "ray"
    model: ClassVar[str]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def divisible(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        """The embedded model's heads cannot be divided by two."""
        folder = tmp_path_factory.mktemp("ranks")
        sizes = {**COMMON, "vocab_size": 1000, "head_dim": 16}
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
        model.save_pretrained(folder)
        cls.model = str(folder)

    def config(self, **options: Any) -> EngineConfig:
        ranks = 1 if options.get("executor") == "inprocess" else 2
        shared = {"model": self.model, "skip_tokenizer_init": True, "tensor_parallel_size": ranks}
        return super().config(**{**shared, **options})

"""The executor `ray`, on a cluster of two nodes that are processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from two_ranks import TwoRanksKit

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, EngineStopped, RankFailed
from jackfield.plugins.conformance.executors import ExecutorKit
from jackfield.plugins.executors.ray import cluster as cluster_module
from jackfield.plugins.executors.ray.actor import device_number
from jackfield.plugins.executors.ray.cluster import Placement
from jackfield.plugins.executors.ray.executor import RayExecutor

from helpers import at_once, make_checkpoint

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
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    own = ray.get_runtime_context().get_node_id()
    place_on(monkeypatch, sorted(alive, key=lambda node: node != own))


def place_on(monkeypatch: pytest.MonkeyPatch, nodes: list[str]) -> None:
    """Put ranks on these nodes."""
    groups = importlib.import_module("ray.util.placement_group")
    create = groups.placement_group

    def placed(bundles: Any, strategy: str, bundle_label_selector: Any) -> Any:
        assert strategy in ("STRICT_PACK", "PACK") and len(bundles) == len(bundle_label_selector)
        selectors = [{"ray.io/node-id": node} for node in nodes[: len(bundles)]]
        return create(bundles, strategy="PACK", bundle_label_selector=selectors)

    monkeypatch.setattr(groups, "placement_group", placed)


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
            assert len(nodes) == made.num_ranks == len(executor.followers) + 1
        return await at_once(
            engine,
            tokens(engine, PROMPT, temperature=0.0),
            tokens(engine, PROMPT[:30], temperature=0.9, seed=7, top_p=0.9),
            tokens(engine, PROMPT[3:9], temperature=0.0, repetition_penalty=1.3),
        )


@pytest.mark.usefixtures("spread")
def test_ranks_of_two_nodes_give_the_tokens_of_one_rank(checkpoint: Path) -> None:
    expected = asyncio.run(mixed(config(checkpoint, executor="inprocess", tensor_parallel_size=1)))
    assert asyncio.run(mixed(config(checkpoint))) == expected


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.usefixtures("spread")
def test_stages_of_two_nodes_give_the_tokens_of_one_rank(checkpoint: Path) -> None:
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    expected = asyncio.run(mixed(config(checkpoint, executor="inprocess", tensor_parallel_size=1)))
    assert asyncio.run(mixed(config(checkpoint, **stages))) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("spread")
def test_an_actor_that_is_stopped_ends_the_engine(checkpoint: Path) -> None:
    """And is gone afterwards, though it does not do what Ray asks of it."""
    process = 0

    async def stop() -> str:
        nonlocal process
        async with AsyncEngine(config(checkpoint, rank_timeout=3.0)) as engine:
            executor: Any = engine.core.executor  # type: ignore[attr-defined]
            process = executor.followers[0].process
            os.kill(process, signal.SIGSTOP)
            await tokens(engine, PROMPT)
            return engine.dead_reason or ""

    reason = asyncio.run(asyncio.wait_for(stop(), DETECTED))
    host = ray.nodes()[0]["NodeManagerHostname"]
    assert f"rank 1 has given no sign of life for 3 seconds (rank 1 on {host} (" in reason
    end = time.monotonic() + DETECTED
    while alive(process):
        assert time.monotonic() < end, "the actor is still there"
        time.sleep(0.05)


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_node_that_is_lost_ends_the_engine(
    checkpoint: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = cluster.add_node(num_cpus=1, num_gpus=0, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    own = ray.get_runtime_context().get_node_id()
    place_on(monkeypatch, [own, third.node_id])

    async def lose() -> str:
        async with AsyncEngine(config(checkpoint)) as engine:
            params = SamplingParams(max_tokens=60, ignore_eos=True)
            async for output in engine.generate(PROMPT, params):
                if len(output.outputs[0].token_ids) == 3 and third in cluster.list_all_nodes():
                    await asyncio.to_thread(cluster.remove_node, third, allow_graceful=False)
            return engine.dead_reason or ""

    assert "rank 1 of 2 on " in asyncio.run(asyncio.wait_for(lose(), DETECTED))


SCRIPT = """
import os, signal, sys
from jackfield import LLM, SamplingParams

llm = LLM(sys.argv[1], device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=128,
          num_gpu_blocks_override=60, tensor_parallel_size=2, executor="ray")
output = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
assert len(output[0].outputs[0].token_ids) == 4
print(llm.engine.core.executor.followers[0].process, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_actors_end_with_a_script_that_is_killed(
    checkpoint: Path, tmp_path: Path, cluster: Any
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = forked.run(
        [sys.executable, str(script), str(checkpoint)],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert run.returncode == -signal.SIGKILL, run.stderr
    process, end = int(run.stdout.split()[-1]), time.monotonic() + DETECTED
    while alive(process):
        assert time.monotonic() < end, "the actor is still there"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_server_ends_with_status_1_if_an_actor_is_lost(
    checkpoint: Path, tmp_path: Path, cluster: Any
) -> None:
    flags = {"device": "cpu", "dtype": "float32", "max-model-len": "128", "port": "0",
             "num-gpu-blocks-override": "60", "tensor-parallel-size": "2",
             "distributed-executor-backend": "ray", "log-level": "info"}  # fmt: skip
    server = forked.Popen(
        [sys.executable, "-m", "jackfield", "serve", str(checkpoint), "--skip-tokenizer-init",
         *(part for name, value in flags.items() for part in (f"--{name}", value))],
        stdout=subprocess.PIPE, stderr=(tmp_path / "log").open("w"), text=True,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
    )  # fmt: skip
    log = tmp_path / "log"
    with server:
        assert server.stdout is not None
        url = re.search(r"http://\S+", server.stdout.readline())
        assert url is not None
        metrics = urllib.request.urlopen(f"{url[0]}/metrics").read().decode()
        host = ray.nodes()[0]["NodeManagerHostname"]
        for rank in (0, 1):
            assert re.search(
                rf'jackfield:rank_steps_total{{host="{host}",.*rank="{rank}"}}', metrics
            )
        [actor] = re.findall(r"rank 1 is process (\d+) on ", log.read_text())
        os.kill(int(actor), signal.SIGKILL)
        server.communicate(timeout=DETECTED)
    assert server.returncode == 1, log.read_text()
    assert "rank 1 of 2 on " in log.read_text()


@pytest.mark.slow
def test_engines_have_a_node_each(checkpoint: Path) -> None:
    """Tokens are those of one rank; one that is killed costs its own requests, and starts again."""
    made = config(checkpoint, data_parallel_size=2)

    async def serve() -> list[list[int]]:
        async with AsyncEngine(made) as engine:
            core: Any = engine.core
            placed = [member.process.process.where for member in core.members]
            actors = [member.process.process._remote for member in core.members]
            assert len({actor.node.id for actor in actors}) == 2, placed

            def ask(member: int) -> Any:
                params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
                return engine.generate(PROMPT, params, data_parallel_rank=member)

            found = [[o async for o in ask(n)][-1].outputs[0].token_ids for n in range(2)]
            stream = ask(1)
            ray.kill(actors[1].actor)
            lost = [output async for output in stream][-1]
            assert f"member 1 of 2{placed[1]} is gone" in (lost.error or "")
            found.append([o async for o in ask(0)][-1].outputs[0].token_ids)
            while not core.members[1].serves:
                await asyncio.sleep(0.1)
            found.append([o async for o in ask(1)][-1].outputs[0].token_ids)
            return found

    expected = asyncio.run(mixed(config(checkpoint, executor="inprocess", tensor_parallel_size=1)))
    assert asyncio.run(asyncio.wait_for(serve(), 3 * DETECTED)) == [expected[0]] * 4


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
                await placement.reserve(1 if full else DETECTED)
            return [[node.id for node in placement.nodes] for placement in placements]
        finally:
            for placement in placements:
                placement.release()

    assert asyncio.run(place(2)) == [[own, own]]
    monkeypatch.setattr(cluster_module, "TOGETHER_SECONDS", 0.3)
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
    def test_experts_move_if_it_says_so(self, tmp_path: Path) -> None:
        """Between actors."""
        super().test_experts_move_if_it_says_so(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("spread")
class TestTwoNodes(TwoRanksKit):
    """Much of it is above, and faster."""

    name = "ray"

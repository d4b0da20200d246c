"""Ranks on several hosts without a cluster: here, hosts are threads that start their ranks."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, EngineStopped, RankFailed
from jackfield.core.registration.executor_choice import choose_executor
from jackfield.core.registry import load_plugins
from jackfield.core.remote import processes
from jackfield.entrypoints.bench.serve.servers import free_port
from jackfield.entrypoints.server.serve_settings import settings
from jackfield.plugins.executors.hosts import leader
from jackfield.plugins.executors.hosts.headless import run_headless

from helpers import at_once, make_checkpoint

PROMPT = [5 + (i * i) % 150 for i in range(40)]


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> Iterator[None]:
    with forked.processes_of(processes):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    return path


def config(checkpoint: Path, **options: Any) -> EngineConfig:
    return EngineConfig(**{
        "model": str(checkpoint), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "block_size": 4, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 60, **options,
    })  # fmt: skip


def of_hosts(checkpoint: Path, secret: Path, **options: Any) -> EngineConfig:
    return config(checkpoint, **{
        "tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port(),
        "master_secret_file": str(secret), **options,
    })  # fmt: skip


async def tokens(engine: AsyncEngine, seed: int) -> list[int]:
    params = SamplingParams(
        temperature=0.8 * (seed % 2), seed=seed, max_tokens=12, ignore_eos=True, detokenize=False
    )
    async for output in engine.generate(PROMPT[seed:], params):
        last = output
    assert last.error is None, last.error
    return list(last.outputs[0].token_ids)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        pytest.param(
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=["ranks", "stages", "two ranks on each host"],
)
async def test_tokens_are_those_of_one_host(
    checkpoint: Path, secret: Path, sizes: dict[str, int]
) -> None:
    async with AsyncEngine(config(checkpoint)) as engine:
        expected = await at_once(engine, *(tokens(engine, seed) for seed in range(3)))
    options = of_hosts(checkpoint, secret, **{"tensor_parallel_size": 1, **sizes})
    executors = load_plugins()["executor"]
    run_host = executors.load(choose_executor(options, executors)).run_host
    other = asyncio.create_task(asyncio.to_thread(run_host, options, 1))
    async with AsyncEngine(options) as engine:
        ranks = engine.core.executor.ranks()  # type: ignore[attr-defined]
        assert [rank.host for rank in ranks[options.num_ranks // 2 :]] == (
            ["127.0.0.1"] * (options.num_ranks // 2)
        )
        assert await at_once(engine, *(tokens(engine, seed) for seed in range(3))) == expected
    assert await other == 0


async def test_a_rank_that_dies_is_named_with_its_host_and_cause(
    checkpoint: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    spawn = processes.spawn

    def noting(*args: Any) -> Any:
        started.append(spawn(*args))
        return started[-1]

    monkeypatch.setattr("jackfield.plugins.executors.hosts.headless.spawn", noting)
    options = of_hosts(checkpoint, secret)
    other = asyncio.create_task(asyncio.to_thread(run_headless, options, 1))
    engine = AsyncEngine(options)
    await engine.start()
    started[0].send_signal(signal.SIGKILL)
    error = r"rank 1 of 2 on host 1 \(127\.0\.0\.1\) was ended by SIGKILL"
    with pytest.raises((RankFailed, EngineStopped, AssertionError), match=error):
        while True:  # Until the engine knows.
            await tokens(engine, 1)
    await engine.stop()
    assert await other == 1


async def test_ranks_of_another_host_write_their_stacks(
    checkpoint: Path, secret: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = of_hosts(checkpoint, secret)
    other = asyncio.create_task(asyncio.to_thread(run_headless, options, 1))
    async with AsyncEngine(options) as engine:
        (follower,) = engine.core.executor.followers  # type: ignore[attr-defined]
        follower.dump_stacks()
        written = ""
        while "plugins/executors/follower.py" not in written:
            written += capfd.readouterr().err
            await asyncio.sleep(0.01)
    assert await other == 0


async def test_hosts_that_are_not_of_the_engine_are_turned_away(
    checkpoint: Path, secret: Path, tmp_path: Path
) -> None:
    """And the engine waits on for those that are."""
    options = of_hosts(checkpoint, secret)
    wrong = tmp_path / "wrong"
    wrong.write_text("another secret of an attacker")
    engine = AsyncEngine(options)
    starting = asyncio.create_task(engine.start())
    stranger = config(
        checkpoint, tensor_parallel_size=2, nnodes=2, master_port=options.master_port,
        master_secret_file=str(wrong),
    )  # fmt: skip
    for other, number in ((stranger, 1), (options, 3)):
        with pytest.raises(ConfigError, match="has another secret") as refusal:
            await asyncio.to_thread(run_headless, other, number)
        assert refusal.value.param == "master_secret_file"
    assert not starting.done()
    host = asyncio.create_task(asyncio.to_thread(run_headless, options, 1))
    await starting
    assert len(await tokens(engine, 0)) == 12
    await engine.stop()
    assert await host == 0


async def test_a_host_with_other_ranks_is_refused(checkpoint: Path, secret: Path) -> None:
    options = of_hosts(checkpoint, secret)
    other = of_hosts(checkpoint, secret, master_port=options.master_port, pipeline_parallel_size=2)
    host = asyncio.create_task(asyncio.to_thread(run_headless, other, 1))
    with pytest.raises(RankFailed, match=r"ranks \(2, 3\), not \(1,\): give it the same nnodes"):
        await AsyncEngine(options).start()
    with pytest.raises((ConfigError, RankFailed)):  # Its ranks find nobody.
        await host


async def test_a_host_that_does_not_come_is_named(
    checkpoint: Path,
    secret: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(leader, "REMIND_SECONDS", 0.05)
    options = of_hosts(checkpoint, secret, distributed_timeout_seconds=0.2)
    missing = "host 1 of 2 has not come.*--headless --node-rank 1"
    with pytest.raises(RankFailed, match=missing):
        await AsyncEngine(options).start()
    assert any("has not come" in each.message for each in caplog.records)
    with pytest.raises(RankFailed, match="the first host is not reached"):
        await asyncio.to_thread(run_headless, options, 1)


async def test_what_hosts_need_is_named(checkpoint: Path, secret: Path, tmp_path: Path) -> None:
    async def refused(**options: Any) -> str | None:
        with pytest.raises(ConfigError) as refusal:
            await AsyncEngine(of_hosts(checkpoint, secret, **options)).start()
        return refusal.value.param

    short = tmp_path / "short"
    short.write_text("too short")
    assert await refused(master_secret_file=None) == "master_secret_file"
    assert await refused(master_secret_file=str(short)) == "master_secret_file"
    assert await refused(master_secret_file=str(tmp_path / "none")) == "master_secret_file"
    assert await refused(nnodes=3) == "nnodes"
    assert await refused(data_parallel_size=2) == "nnodes"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert await refused(master_port=taken.getsockname()[1]) == "master_addr"


def test_executors_of_one_host_are_not_chosen(checkpoint: Path, secret: Path) -> None:
    executors = load_plugins()["executor"]
    assert choose_executor(of_hosts(checkpoint, secret), executors) == "processes"
    assert choose_executor(of_hosts(checkpoint, secret, executor="mp"), executors) == "processes"
    with pytest.raises(ConfigError, match="nnodes: executor 'ray' does not join"):
        choose_executor(of_hosts(checkpoint, secret, executor="ray"), executors)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--node-rank 1 --headless", "node_rank"),
        ("-n 2 -tp 2 --node-rank 2 --headless", "node_rank"),
        ("-n 2 -tp 2 -r 1", "node_rank"),
        ("-n 2 -tp 2 --headless", "headless"),
        ("-n 2 -tp 3", "nnodes"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words: str, field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        settings(words.split())
    assert refusal.value.param == field


def test_sglangs_address_of_the_first_host() -> None:
    made = settings("--nnodes 2 --tp 2 --dist-init-addr [::1]:5000".split())
    assert (made.config.master_addr, made.config.master_port) == ("::1", 5000)


@pytest.mark.slow
def test_the_command_runs_a_host(checkpoint: Path, secret: Path) -> None:
    """A server on two hosts answers, and both commands end with it."""
    port, http = free_port(), free_port()
    command = [
        sys.executable, "-m", "jackfield", "serve", "--device", "cpu", "-pp", "2", "--nnodes", "2",
        "--master-port", str(port), "--master-secret-file", str(secret), "--port", str(http),
    ]  # fmt: skip
    other = subprocess.Popen([*command, "--headless", "--node-rank", "1"])
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert any("Serving" in line for line in first.stdout)
        body = json.dumps({"model": "jackfield-tiny", "prompt": "Hello", "max_tokens": 4})
        request = urllib.request.Request(
            f"http://127.0.0.1:{http}/v1/completions", body.encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        first.send_signal(signal.SIGTERM)
        assert (first.wait(), other.wait()) == (0, 0)
    finally:
        for process in (first, other):
            process.kill()
            process.wait()

"""Engines that divide a mixture's experts among them (`enable_expert_parallel`, several
`data_parallel_size`): whose tokens they serve, how they rest, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest

from jackfield import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from jackfield.core.data_parallel.pooled_cores import PooledCores
from jackfield.core.errors import ConfigError, EngineStopped
from jackfield.core.parallel.meeting import VARIABLE, MeetingPlace
from jackfield.core.remote import processes as remote_processes

from helpers import make_checkpoint


@pytest.fixture(scope="module", autouse=True)
def forked_members() -> Iterator[None]:
    with forked.processes_of(remote_processes):
        yield


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4,
        max_num_batched_tokens=32, num_gpu_blocks_override=64, skip_tokenizer_init=True,
        **options,
    )  # fmt: skip


def outputs(
    engine: AsyncEngine, number: int, *, max_tokens: int = 16, **options: Any
) -> AsyncIterator[RequestOutput]:
    """Prompts of several lengths, greedy and drawn."""
    prompt = [3 + (number * 7 + 11 * at) % 140 for at in range(2 + 19 * number)]
    params = SamplingParams(
        temperature=0.7 * (number % 2), seed=number, max_tokens=max_tokens, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip
    return engine.generate(prompt, params, **options)


async def tokens(engine: AsyncEngine) -> list[list[int]]:
    async def of(number: int) -> list[int]:
        async for output in outputs(engine, number):
            last = output
        assert last.error is None, last.error
        return list(last.outputs[0].token_ids)

    return list(await asyncio.gather(*map(of, range(5))))


async def one_engines_tokens(folder: Path) -> list[list[int]]:
    async with AsyncEngine(config_of(folder)) as engine:
        return await tokens(engine)


async def test_engines_serve_the_tokens_of_one_rest_and_end_together(tmp_path: Path) -> None:
    """Seven experts of two engines. A pause finds one with a request and one without, which takes
    part in the other's steps; a request goes on behind it."""
    folder = make_checkpoint("qwen3-moe", tmp_path)
    alone = await one_engines_tokens(folder)
    config = config_of(folder, data_parallel_size=2, enable_expert_parallel=True)
    async with AsyncEngine(config) as engine:
        assert await tokens(engine) == alone
        stream = outputs(engine, 1, max_tokens=60, data_parallel_rank=0)
        first = await anext(stream)
        await engine.pause_generation("keep")
        await engine.resume_generation()
        async for output in stream:
            last = output
        assert last.error is None and len(last.outputs[0].token_ids) == 60
        assert list(last.outputs[0].token_ids)[:16] == alone[1]
        assert list(first.outputs[0].token_ids) == alone[1][: len(first.outputs[0].token_ids)]
        # The experts of the one that dies are missing to the other's requests.
        stream = outputs(engine, 1, max_tokens=100, data_parallel_rank=0)
        await anext(stream)
        assert isinstance(engine.core, PooledCores)
        process = engine.core.members[1].process
        assert process is not None and process.process is not None
        process.process.kill()
        async for output in stream:
            last = output
        assert last.outputs[0].finish_reason == "error", last
        keepers = engine.core._keepers
        await asyncio.wait(keepers)
        assert "member 1 of 2 was ended by SIGKILL" in str(engine.dead_reason)
        with pytest.raises(EngineStopped, match="member 1 of 2 was ended by SIGKILL"):
            await anext(outputs(engine, 1))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux lists sockets there")
def test_engines_meet_where_no_other_host_comes() -> None:
    place = MeetingPlace()
    port = int(place.environment(1)[VARIABLE].split(":")[1])
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        if (file := Path("/proc/net", name)).exists()
        for line in file.read_text().splitlines()[1:]
    ]
    own = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]
    assert own == [f"0100007F:{port:04X}"], "listening sockets of this port"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size"), [("qwen3-moe", 2), ("gpt-oss", 1), ("llama4", 1)], ids=str
)
async def test_engines_of_several_ranks_and_other_mixtures(
    family: str, size: int, tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path)
    config = config_of(
        folder, data_parallel_size=2, tensor_parallel_size=size, enable_expert_parallel=True
    )
    async with AsyncEngine(config) as engine:
        assert await tokens(engine) == await one_engines_tokens(folder)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "do not draft"),
        ({"pipeline_parallel_size": 2}, "have no stages yet"),
        ({"executor": "inprocess"}, "does not join the ranks of other engines"),
    ],
)
async def test_what_engines_with_common_experts_do_not_have_is_refused(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = make_checkpoint("qwen3-moe", tmp_path)
    with pytest.raises(ConfigError, match=reason) as caught:
        config = config_of(folder, data_parallel_size=2, enable_expert_parallel=True, **options)
        await AsyncEngine(config).start()
    assert caught.value.param == "enable_expert_parallel"

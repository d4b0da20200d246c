"""Ranks that join a group, exchange tensors, and leave."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from jackfield.core.config import EngineConfig
from jackfield.core.errors import ConfigError, PluginError
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.hooks import hookimpl
from jackfield.core.parallel.join import join, leave, listen
from jackfield.core.parallel.ranks import Pipeline, Ranks
from jackfield.core.registry import Provenance, load_plugins
from jackfield.plugins.collectives.builtin import Gloo, Nccl
from jackfield.plugins.conformance.rank_threads import run_ranks


def exchange(size: int, work: Callable[[Ranks], Any], **options: Any) -> list[Any]:
    """What `work` returns on each of `size` ranks, threads over gloo."""
    plugins = load_plugins()
    config = EngineConfig(
        device="cpu", tensor_parallel_size=size, distributed_timeout_seconds=30, **options
    )
    listener = listen()
    address = listener.getsockname()[:2]

    def run(rank: int) -> Any:
        ranks = join(
            config, plugins, rank=rank, address=address, listener=None if rank else listener
        )
        try:
            return work(ranks)
        finally:
            leave(ranks)

    return run_ranks([lambda rank=rank: run(rank) for rank in range(size)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_sums_are_the_same_bits_on_each_rank(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    terms = (10 * torch.randn(3, 7, 33, generator=draw)).to(dtype)
    sums = exchange(3, lambda ranks: ranks.tensor.all_reduce(terms[ranks.tensor.rank].clone()))
    assert all(torch.equal(got, sums[0]) for got in sums)
    torch.testing.assert_close(sums[0].double(), terms.double().sum(0), atol=0.5, rtol=0)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (3, 0)])
def test_parts_are_joined_in_the_last_dimension_by_rank(shape: tuple[int, ...]) -> None:
    parts = torch.arange(2.0).view(2, *[1] * len(shape)) + torch.randn(2, *shape)
    for got in exchange(2, lambda ranks: ranks.tensor.all_gather(parts[ranks.tensor.rank])):
        assert torch.equal(got, torch.cat(list(parts), dim=-1))


def test_the_environment_is_left_alone() -> None:
    before = dict(os.environ)
    exchange(2, lambda ranks: None)
    assert dict(os.environ) == before


def test_two_groups_of_one_process_do_not_meet() -> None:
    def work(ranks: Ranks) -> torch.Tensor:
        if ranks.tensor.rank:
            return ranks.tensor.all_reduce(torch.ones(1))
        inner = exchange(2, lambda others: others.tensor.all_reduce(torch.full((1,), 5.0)))
        assert [float(each) for each in inner] == [10.0, 10.0]
        return ranks.tensor.all_reduce(torch.ones(1))

    assert [float(total) for total in exchange(2, work)] == [2.0, 2.0]


def test_a_rank_that_nobody_joins_is_refused_in_time() -> None:
    config = EngineConfig(device="cpu", tensor_parallel_size=2, distributed_timeout_seconds=0.3)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = closed.getsockname()
        with pytest.raises(ConfigError, match="rank 1 of 2 cannot join") as caught:
            join(config, load_plugins(), rank=1, address=address)
    assert caught.value.param == "tensor_parallel_size"


def test_collectives_of_another_device_are_refused_by_name() -> None:
    config = EngineConfig(device="cpu", tensor_parallel_size=2, collectives="nccl")
    with pytest.raises(ConfigError, match="nccl") as caught:
        join(config, load_plugins(), rank=0, address=("127.0.0.1", 0))
    assert caught.value.param == "collectives"


class BadCollectives(Gloo):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise RuntimeError("bang")


def test_collectives_that_raise_are_named_with_their_distribution() -> None:
    def register_collectives(registry: Any) -> None:
        registry.add("bad", BadCollectives)

    plugins = load_plugins()
    plugin = type("Bad", (), {
        "jackfield_api": API_VERSION,
        "register_collectives": staticmethod(hookimpl(register_collectives)),
    })()  # fmt: skip
    plugins.add_plugin(plugin, Provenance("bad-dist", "2.0", "bad"))
    config = EngineConfig(device="cpu", tensor_parallel_size=2, collectives="bad")
    with pytest.raises(PluginError, match=r"bad.* of bad-dist 2\.0 .*RuntimeError: bang"):
        join(config, plugins, rank=0, address=("127.0.0.1", 0))


def test_all_groups_are_left_also_if_one_fails() -> None:
    closed: list[str] = []

    class Closing:
        rank, size = 0, 2

        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            raise RuntimeError(self.name)

    group: Any = Closing
    ranks = Ranks(tensor=group("tensor"), all2all=group("tokens"))
    with pytest.raises(RuntimeError):
        leave(replace(ranks, pipeline=Pipeline(world=group("world"))))
    assert closed == ["tokens", "tensor", "world"]


def test_nccl_is_for_cuda_devices_of_a_build_that_has_it() -> None:
    built = torch.distributed.is_nccl_available()
    assert Nccl.supports(torch.device("cuda")) == (
        None if built else "this build of torch has no NCCL"
    )
    refusal = Nccl.supports(torch.device("cpu"))
    assert refusal is not None and ("CUDA" in refusal if built else "NCCL" in refusal)
